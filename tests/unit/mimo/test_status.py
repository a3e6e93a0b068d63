"""Every error survives the trip through google.rpc.Status."""

import pytest

import mimo.errors
from mimo.errors import Internal, InvalidRequest, MimoError, Reason
from mimo.rpc.status import from_exception, from_status, to_status

KINDS = [kind for kind in vars(mimo.errors).values() if isinstance(kind, type)]
ON_THE_WIRE = [kind for kind in KINDS if issubclass(kind, MimoError) and kind is not MimoError]


@pytest.mark.parametrize("kind", ON_THE_WIRE)
def test_round_trip(kind: type[MimoError]) -> None:
    sent = kind("why", field="messages[0]", retry_after_s=2.25, limit=7)
    got = from_status(to_status(sent))
    assert type(got) is kind
    assert (got.message, got.reason, got.field) == ("why", kind.default_reason, "messages[0]")
    assert (got.retry_after_s, got.metadata) == (2.25, {"limit": "7"})


def test_a_foreign_domain_is_not_believed() -> None:
    status = to_status(InvalidRequest("x", reason=Reason.MEDIA_LIMIT))
    status.details[0].value = status.details[0].value.replace(b"mimo", b"evil")
    assert from_status(status).reason is Reason.INVALID_VALUE


def test_an_unknown_exception_keeps_its_text_to_itself() -> None:
    error = from_exception(ValueError("/etc/passwd"))
    assert isinstance(error, Internal)
    assert "passwd" not in error.message
