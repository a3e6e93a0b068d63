"""The playground: a page, its script and its style, from the package itself."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.errors import plain_error

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "media-src 'self' blob: data:; connect-src 'self'; font-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


async def playground(request: Request) -> Response:
    """One of its files; the page itself when none is named."""
    name: str = request.path_params.get("name", "index.html")
    kind = _TYPES.get(name.rpartition(".")[2])
    file = resources.files("gateway") / "web" / name
    if kind is None or not file.is_file():
        return plain_error(404, "no such page", "unknown_url")
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}
    return Response(file.read_bytes(), media_type=f"{kind}; charset=utf-8", headers=headers)
