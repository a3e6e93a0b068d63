"""Whose fault a failed call to a replica is."""

import grpc
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata

from gateway.backends.faults import upstream_error
from mimo.errors import DeadlineExceeded, Internal, InvalidRequest, MimoError, Reason, Unavailable
from mimo.rpc.status import DETAILS_KEY, to_status


def failed(code: grpc.StatusCode, trailing: Metadata | None = None) -> AioRpcError:
    return AioRpcError(code, Metadata(), trailing or Metadata(), details="no such thing")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (StatusCode.UNKNOWN, Unavailable),
        (StatusCode.UNIMPLEMENTED, Unavailable),
        (StatusCode.UNAVAILABLE, Unavailable),
        (StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (StatusCode.INVALID_ARGUMENT, Internal),
        (StatusCode.NOT_FOUND, Internal),
        (StatusCode.UNAUTHENTICATED, Internal),
        (StatusCode.PERMISSION_DENIED, Internal),
    ],
)
def test_what_nobody_explains_is_not_the_clients_fault(
    code: grpc.StatusCode, kind: type[MimoError]
) -> None:
    assert type(upstream_error(failed(code))) is kind


def test_an_explanation_is_passed_on() -> None:
    told = InvalidRequest("too long", reason=Reason.CONTEXT_LENGTH_EXCEEDED, field="messages")
    details = Metadata((DETAILS_KEY, to_status(told).SerializeToString()))
    error = upstream_error(failed(StatusCode.INVALID_ARGUMENT, details))
    assert isinstance(error, InvalidRequest)
    assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
