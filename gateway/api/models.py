"""GET /v1/models, the health endpoints and POST /v1/media."""

import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.body import read_limited
from gateway.api.errors import UnsupportedBody
from gateway.catalog import Catalog, ModelCard
from gateway.salt import tenant_salt
from gateway.uploads import EXPIRES_S, MAX_UPLOAD_BYTES, Uploads


class Models:
    """What is served."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_card(self._catalog.card)]})

    async def get(self, request: Request) -> Response:
        """Raises NotFound (MODEL_NOT_FOUND)."""
        self._catalog.check(request.path_params["model"])
        return JSONResponse(_card(self._catalog.card))


class Media:
    """Files sent ahead of a request."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads

    async def upload(self, request: Request) -> Response:
        """Keep the raw body; its content decides what it is. Raises InvalidRequest."""
        kind = request.headers.get("content-type", "")
        if kind.lower().startswith("multipart/"):
            raise UnsupportedBody("send the file itself as the body", "unsupported_content_type")
        data = await read_limited(request, MAX_UPLOAD_BYTES)
        salt = tenant_salt(request.query_params.get("cache_salt", ""))
        upload = await self._uploads.add(data, salt)
        return JSONResponse(
            {
                "media_ref": upload.reference,
                "modality": upload.modality.value,
                "bytes": upload.num_bytes,
                "expires_at": int(time.time()) + EXPIRES_S,
            }
        )


class Health:
    """Liveness is that it answers; readiness is that it is not draining."""

    def __init__(self, is_draining: Callable[[], bool]) -> None:
        self._is_draining = is_draining

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self._is_draining():
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})


def _card(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "mimo",
        "max_model_len": card.max_context_tokens,
        "capabilities": {
            "input": ["text", *(modality.value for modality in card.inputs)],
            "output": ["text"],
        },
    }
