"""Errors as HTTP answers: a status that says whether a retry can help, and one nested object."""

import json
from typing import Any

import pytest

from gateway.api.errors import (
    RENDERINGS,
    UnsupportedBody,
    error_object,
    error_response,
    plain_error,
)
from mimo.errors import (
    Cancelled,
    DeadlineExceeded,
    EmbeddingMissing,
    Internal,
    InvalidRequest,
    MimoError,
    NotFound,
    Overloaded,
    Reason,
    Unauthenticated,
    Unavailable,
)

# The clients retry these by themselves, unless told otherwise.
RETRIED = {408, 409, 429, *range(500, 600)}


def answer(error: MimoError) -> tuple[int, dict[str, Any], dict[str, str]]:
    response = error_response(error, "req_1")
    return response.status_code, json.loads(bytes(response.body))["error"], dict(response.headers)


@pytest.mark.parametrize(
    "error, status, kind, code, retry_after, should_retry",
    [
        (InvalidRequest("x"), 400, "invalid_request_error", "invalid_value", None, None),
        (
            InvalidRequest("x", reason=Reason.MISSING_FIELD),
            *(400, "invalid_request_error", "missing_required_parameter", None, None),
        ),
        (
            InvalidRequest("x", reason=Reason.MEDIA_LIMIT, which="pixels"),
            *(400, "invalid_request_error", "media_too_large", None, None),
        ),
        (
            InvalidRequest("x", reason=Reason.MEDIA_LIMIT, which="audio_duration_s"),
            *(400, "invalid_request_error", "audio_too_long", None, None),
        ),
        (
            InvalidRequest("x", reason=Reason.MEDIA_LIMIT, which="video_duration_s"),
            *(400, "invalid_request_error", "video_too_long", None, None),
        ),
        (
            InvalidRequest("x", reason=Reason.MEDIA_LIMIT, which="frames"),
            *(400, "invalid_request_error", "video_too_long", None, None),
        ),
        (
            InvalidRequest("x", reason=Reason.MEDIA_ENCODING, which="data_url"),
            *(400, "invalid_request_error", "invalid_data_url", None, None),
        ),
        (
            InvalidRequest("x", reason=Reason.MEDIA_ENCODING),
            *(400, "invalid_request_error", "invalid_base64", None, None),
        ),
        (
            InvalidRequest("x", reason=Reason.URL_BLOCKED),
            *(400, "invalid_request_error", "url_not_allowed", None, None),
        ),
        (
            NotFound("x", reason=Reason.MEDIA_NOT_FOUND),
            *(400, "invalid_request_error", "media_not_found", None, None),
        ),
        (NotFound("x"), 404, "invalid_request_error", "model_not_found", None, None),
        (Unauthenticated("x"), 401, "invalid_request_error", "invalid_api_key", None, None),
        (
            InvalidRequest("x", reason=Reason.REQUEST_TOO_LARGE),
            *(413, "invalid_request_error", "request_too_large", None, None),
        ),
        (
            UnsupportedBody("x", "unsupported_encoding"),
            *(415, "invalid_request_error", "unsupported_encoding", None, None),
        ),
        (Overloaded("x"), 503, "server_error", "overloaded", "1", None),
        (Overloaded("x", retry_after_s=12.4), 503, "server_error", "overloaded", "12", None),
        (Overloaded("x", retry_after_s=900), 503, "server_error", "overloaded", "60", None),
        (Overloaded("x", retry_after_s=0.01), 503, "server_error", "overloaded", "1", None),
        (
            Overloaded("x", reason=Reason.QUOTA_HARD),
            *(429, "rate_limit_error", "insufficient_quota", None, "false"),
        ),
        (
            Unavailable("x", reason=Reason.DRAINING),
            *(503, "server_error", "service_unavailable", "2", None),
        ),
        (Unavailable("x"), 503, "server_error", "upstream_unavailable", "1", None),
        (Cancelled("x"), 503, "server_error", "service_unavailable", "1", None),
        (DeadlineExceeded("x", stage="queue"), 503, "server_error", "overloaded", "5", None),
        (DeadlineExceeded("x", stage="encode"), 504, "server_error", "timeout", None, "false"),
        (EmbeddingMissing("x"), 500, "server_error", "internal_error", "1", "true"),
        (Internal("x"), 500, "server_error", "internal_error", None, "false"),
    ],
)
def test_the_table(
    error: MimoError,
    status: int,
    kind: str,
    code: str,
    retry_after: str | None,
    should_retry: str | None,
) -> None:
    got, body, headers = answer(error)
    assert (got, body["type"], body["code"]) == (status, kind, code)
    assert headers.get("retry-after") == retry_after
    assert headers.get("x-should-retry") == should_retry


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_an_answer_that_clients_handle(reason: Reason) -> None:
    rendering = RENDERINGS[reason]
    assert rendering.code and rendering.type.endswith("_error")
    if rendering.status in RETRIED:
        # Either a retry can help and we say when, or the clients are told to leave it.
        assert rendering.retry_after_s is not None or rendering.should_retry is False


def test_the_param_is_the_field() -> None:
    _, body, _ = answer(InvalidRequest("bad", field="messages[0].content[1]"))
    assert body == {
        "message": "bad",
        "type": "invalid_request_error",
        "param": "messages[0].content[1]",
        "code": "invalid_value",
    }


def test_a_bug_shows_its_request_id_and_nothing_else() -> None:
    body = error_object(Internal("/etc/secret at 10.0.0.7"), "req_9")
    assert body["error"]["message"] == "internal error, request id req_9"


def test_messages_are_short() -> None:
    _, body, _ = answer(InvalidRequest("x" * 5000))
    assert len(body["message"]) == 1000


def test_headers_that_some_statuses_need() -> None:
    assert answer(Unauthenticated("x"))[2]["www-authenticate"] == "Bearer"
    assert answer(InvalidRequest("x", reason=Reason.REQUEST_TOO_LARGE))[2]["connection"] == "close"
    assert answer(Unavailable("x", reason=Reason.DRAINING))[2]["connection"] == "close"


def test_plain_errors_have_the_same_shape() -> None:
    response = plain_error(404, "unknown URL", "unknown_url")
    assert json.loads(bytes(response.body))["error"].keys() == {"message", "type", "param", "code"}
