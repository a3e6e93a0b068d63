"""Errors as the OpenAI clients understand them: one nested object, a status that says whether a
retry can help.

The SDKs retry 408, 409, 429 and 5xx by themselves, so what a retry cannot cure is never one of
those unless ``x-should-retry: false`` goes with it.
"""

from dataclasses import dataclass

from starlette.responses import JSONResponse

from mimo.errors import Internal, InvalidRequest, MimoError, Reason

INVALID, SERVER = "invalid_request_error", "server_error"
PERMISSION, RATE = "permission_error", "rate_limit_error"

MAX_MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Rendering:
    """How one reason looks over HTTP. ``retry_after_s`` is used when the error names none."""

    status: int
    type: str
    code: str
    retry_after_s: int | None = None
    should_retry: bool | None = None


_BAD = {
    Reason.INVALID_JSON: "invalid_json",
    Reason.MISSING_FIELD: "missing_required_parameter",
    Reason.INVALID_TYPE: "invalid_type",
    Reason.INVALID_VALUE: "invalid_value",
    Reason.UNSUPPORTED_PARAMETER: "unsupported_parameter",
    Reason.UNIMPLEMENTED: "unsupported_parameter",
    Reason.FORBIDDEN_PARAMETER: "forbidden_parameter",
    Reason.CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
    Reason.GRAMMAR_INVALID: "invalid_json_schema",
    Reason.GRAMMAR_TOO_COMPLEX: "grammar_too_complex",
    Reason.TOO_MANY_MEDIA: "too_many_media",
    Reason.MEDIA_ENCODING: "invalid_base64",
    Reason.MEDIA_UNSUPPORTED: "unsupported_media_type",
    Reason.MEDIA_MODALITY: "media_modality_mismatch",
    Reason.MEDIA_CORRUPT: "invalid_media",
    Reason.MEDIA_EMPTY: "empty_media",
    Reason.MEDIA_LIMIT: "media_too_large",
    Reason.MEDIA_ENCRYPTED: "media_encrypted",
    Reason.MEDIA_DECODE_FAILED: "media_decode_failed",
    Reason.MEDIA_NOT_FOUND: "media_not_found",
    Reason.URL_INVALID: "invalid_url",
    Reason.URL_BLOCKED: "url_not_allowed",
    Reason.URL_FETCH_FAILED: "media_fetch_failed",
    Reason.URL_FETCH_TIMEOUT: "media_fetch_timeout",
    Reason.MODEL_ENDPOINT: "unsupported_model_for_endpoint",
    Reason.POLICY: "content_policy_violation",
    Reason.CAPACITY: "context_length_exceeded",
}

# What one reason covers and clients want told apart, by the error's ``which``.
_FINER = {
    (Reason.MEDIA_ENCODING, "data_url"): "invalid_data_url",
    (Reason.MEDIA_LIMIT, "audio_duration_s"): "audio_too_long",
    (Reason.MEDIA_LIMIT, "video_duration_s"): "video_too_long",
    (Reason.MEDIA_LIMIT, "frames"): "video_too_long",
}

RENDERINGS: dict[Reason, Rendering] = {
    **{reason: Rendering(400, INVALID, code) for reason, code in _BAD.items()},
    Reason.UNAUTHENTICATED: Rendering(401, INVALID, "invalid_api_key"),
    Reason.PERMISSION: Rendering(403, PERMISSION, "permission_denied"),
    Reason.MODEL_NOT_FOUND: Rendering(404, INVALID, "model_not_found"),
    Reason.REQUEST_TOO_LARGE: Rendering(413, INVALID, "request_too_large"),
    Reason.QUOTA: Rendering(429, RATE, "rate_limit_exceeded", retry_after_s=1),
    Reason.QUOTA_HARD: Rendering(429, RATE, "insufficient_quota", should_retry=False),
    Reason.CONCURRENCY: Rendering(429, RATE, "concurrency_limit", retry_after_s=1),
    Reason.OVERLOADED: Rendering(503, SERVER, "overloaded", retry_after_s=1),
    Reason.DRAINING: Rendering(503, SERVER, "service_unavailable", retry_after_s=2),
    Reason.UPSTREAM_LOST: Rendering(503, SERVER, "upstream_unavailable", retry_after_s=1),
    Reason.CANCELLED: Rendering(503, SERVER, "service_unavailable", retry_after_s=1),
    Reason.DEADLINE: Rendering(504, SERVER, "timeout", should_retry=False),
    Reason.EMBEDDING_MISSING: Rendering(500, SERVER, "internal_error", 1, should_retry=True),
    Reason.EMBEDDING_MISMATCH: Rendering(500, SERVER, "internal_error", 1, should_retry=True),
    Reason.INTERNAL: Rendering(500, SERVER, "internal_error", should_retry=False),
}


class UnsupportedBody(InvalidRequest):
    """The body's type or encoding is not one that this endpoint reads. ``code`` is REST's own."""

    def __init__(self, message: str, rest_code: str) -> None:
        super().__init__(message)
        self.rest_code = rest_code


def error_object(error: MimoError, request_id: str) -> dict[str, dict[str, object]]:
    """The ``{"error": …}`` body. A bug shows its request id and nothing else."""
    rendering = _rendering(error)
    message = error.message[:MAX_MESSAGE_CHARACTERS]
    if isinstance(error, Internal):
        message = f"internal error, request id {request_id}"
    return _body(message, rendering.type, error.field, rendering.code)


def error_response(error: MimoError, request_id: str) -> JSONResponse:
    """A complete HTTP answer for an error."""
    rendering = _rendering(error)
    headers: dict[str, str] = {}
    retry_after_s = error.retry_after_s or rendering.retry_after_s
    if retry_after_s is not None and rendering.status >= 429:
        headers["retry-after"] = str(max(1, min(60, round(retry_after_s))))
    if rendering.should_retry is not None:
        headers["x-should-retry"] = str(rendering.should_retry).lower()
    if rendering.status == 401:
        headers["www-authenticate"] = "Bearer"
    if rendering.status == 413 or error.reason is Reason.DRAINING:
        headers["connection"] = "close"
    return JSONResponse(error_object(error, request_id), rendering.status, headers)


def plain_error(
    status: int, message: str, code: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """An HTTP-level refusal that has no counterpart over gRPC (unknown URL, method, host)."""
    kind = PERMISSION if status == 403 else INVALID
    return JSONResponse(_body(message, kind, None, code), status, headers)


def _rendering(error: MimoError) -> Rendering:
    """By reason, but for what is told apart."""
    if isinstance(error, UnsupportedBody):
        return Rendering(415, INVALID, error.rest_code)
    if error.reason is Reason.DEADLINE and error.metadata.get("stage") == "queue":
        return Rendering(503, SERVER, "overloaded", retry_after_s=5)
    finer = _FINER.get((error.reason, error.metadata.get("which", "")))
    if finer is not None:
        return Rendering(400, INVALID, finer)
    return RENDERINGS[error.reason]


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, dict[str, object]]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
