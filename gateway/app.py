"""The REST application: its routes, and what surrounds them all."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.api.chat import Chat
from gateway.api.cors import Cors
from gateway.api.disconnect import CancelOnDisconnect
from gateway.api.endpoint import Endpoint
from gateway.api.errors import plain_error
from gateway.api.guard import LOCAL_HOSTS, Guard
from gateway.api.headers import CommonHeaders
from gateway.api.models import Health, Media, Models
from gateway.api.playground import playground
from gateway.api.sse import PATIENCE, Patience
from gateway.catalog import Catalog
from gateway.held import HeldBytes
from gateway.metering import CallMeter
from gateway.pipeline import Pipeline
from gateway.uploads import Uploads
from mimo.rpc.interceptors import DrainGate

_CHAT_ALONE = ("completions", "embeddings", "responses", "images")


def create_app(
    pipeline: Pipeline,
    catalog: Catalog,
    uploads: Uploads,
    meter: CallMeter,
    gate: DrainGate,
    *,
    hosts: frozenset[str] = LOCAL_HOSTS,
    origins: frozenset[str] = frozenset(),
    memory: HeldBytes | None = None,
    patience: Patience = PATIENCE,
) -> ASGIApp:
    """The whole REST face. ``hosts`` are the names by which it may be addressed, ``origins`` those
    of other sites whose pages may call it. ``memory`` is what it shares with the other face."""
    chat = Chat(pipeline, catalog, meter, patience)
    models, media = Models(catalog), Media(uploads)
    health = Health(lambda: gate.draining)
    completions = Endpoint(meter, "generate", chat.completions, chat.admit)
    app = Starlette(
        routes=[
            *_route("/v1/chat/completions", completions, "POST"),
            *_route("/v1/tokenize", Endpoint(meter, "count_tokens", chat.tokenize), "POST"),
            *_route("/v1/media", Endpoint(meter, "upload", media.upload), "POST"),
            *_route("/v1/models", Endpoint(meter, "models", models.list), "GET"),
            *_route("/v1/models/{model:path}", Endpoint(meter, "models", models.get), "GET"),
            Route("/healthz", health.live),
            Route("/readyz", health.ready),
            Route("/playground", playground),
            Route("/playground/{name}", playground),
            Route("/", _home),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # a redirect would turn POST into GET
    guarded = Guard(CancelOnDisconnect(app), gate, hosts, origins, memory)
    return CommonHeaders(Cors(guarded, origins))


def _route(path: str, endpoint: Endpoint, method: str) -> list[Route]:
    """With and without a trailing slash."""
    return [Route(each, endpoint, methods=[method]) for each in (path + "/", path)]


async def _home(request: Request) -> Response:
    return RedirectResponse("/playground")


async def _http_error(request: Request, error: Exception) -> Response:
    """What routing alone refuses: 404 and 405."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        allow = dict(error.headers or {})
        return plain_error(405, f"{where}: method not allowed", "method_not_allowed", allow)
    return plain_error(404, f"unknown URL: {where}{_hint(request.url.path)}", "unknown_url")


def _hint(path: str) -> str:
    if path.startswith("/v1/v1/"):
        return "; the base URL already ends in /v1"
    if not path.startswith("/v1/"):
        return "; the API is below /v1"
    if path.split("/")[2] in _CHAT_ALONE:
        return "; use /v1/chat/completions"
    return ""
