"""Errors over gRPC, both directions: a MimoError is a status with ``google.rpc`` details.

``ErrorInfo`` carries reason, domain and metadata; ``BadRequest`` the offending field;
``RetryInfo`` the pause. A status without our details still becomes the closest MimoError.
"""

import asyncio
from collections.abc import Iterable

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from mimo.errors import (
    Cancelled,
    DeadlineExceeded,
    EmbeddingMismatch,
    EmbeddingMissing,
    Internal,
    InvalidRequest,
    MimoError,
    NotFound,
    Overloaded,
    PermissionDenied,
    Reason,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)

DOMAIN = "mimo"
DETAILS_KEY = "grpc-status-details-bin"

_ERRORS: tuple[type[MimoError], ...] = (
    InvalidRequest,
    NotFound,
    Unauthenticated,
    PermissionDenied,
    Unimplemented,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
    Cancelled,
    Internal,
)

_BY_CODE: dict[str, type[MimoError]] = {
    **{error.code: error for error in _ERRORS},
    "OUT_OF_RANGE": InvalidRequest,
    "ABORTED": Unavailable,
}

_BY_REASON: dict[Reason, type[MimoError]] = {
    Reason.EMBEDDING_MISSING: EmbeddingMissing,
    Reason.EMBEDDING_MISMATCH: EmbeddingMismatch,
}


def to_status(error: MimoError) -> status_pb2.Status:
    """The ``google.rpc.Status`` that carries this error."""
    details: list[any_pb2.Any] = []
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.value, domain=DOMAIN, metadata=error.metadata
    )
    _pack(details, info)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message, reason=error.reason.value
        )
        _pack(details, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        _pack(details, error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.code), message=error.message, details=details
    )


def from_status(status: status_pb2.Status) -> MimoError:
    """The error a status carries."""
    reason: Reason | None = None
    field: str | None = None
    retry_after_s: float | None = None
    metadata: dict[str, str] = {}
    for detail in status.details:
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason = Reason(info.reason) if info.reason in Reason.__members__ else None
            metadata = dict(info.metadata)
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    kind = _BY_REASON.get(reason) if reason is not None else None
    kind = kind or _BY_CODE.get(code_pb2.Code.Name(status.code), Internal)
    error = kind(status.message, reason=reason, field=field, retry_after_s=retry_after_s)
    error.metadata = metadata
    return error


def from_rpc_error(error: grpc.RpcError) -> MimoError:
    """The error behind a failed call."""
    for key, value in _trailing_metadata(error):
        if key == DETAILS_KEY and isinstance(value, bytes):
            return from_status(status_pb2.Status.FromString(value))
    name = error.code().name
    return _BY_CODE.get(name, Internal)(error.details() or name)


def is_explained(error: grpc.RpcError) -> bool:
    """Whether a servicer of ours ended the call, with our details."""
    return any(key == DETAILS_KEY for key, _ in _trailing_metadata(error))


def from_exception(error: BaseException) -> MimoError:
    """Any exception of a handler as an error that may leave the process.

    What is not ours becomes Internal without its text: a message of a library may hold anything.
    """
    if isinstance(error, MimoError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error)
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("the deadline passed")
    if isinstance(error, asyncio.CancelledError):
        return Cancelled("the call was cancelled")
    return Internal("internal error")


async def abort(
    context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    error: MimoError,
) -> None:
    """End a call with this error. Always raises."""
    await context.abort(
        grpc.StatusCode[error.code],
        error.message,
        trailing_metadata=((DETAILS_KEY, to_status(error).SerializeToString()),),
    )


def _pack(details: list[any_pb2.Any], message: object) -> None:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    details.append(packed)


def _trailing_metadata(error: grpc.RpcError) -> list[tuple[str, str | bytes]]:
    pairs: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore
    return list(pairs)
