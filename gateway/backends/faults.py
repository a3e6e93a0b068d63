"""What went wrong with a call to a replica, and whose fault that is."""

import grpc

from mimo.errors import Internal, MimoError, Unavailable
from mimo.rpc.status import from_rpc_error, is_explained

# Our servicers explain every failure. Without an explanation these come from the transport, from a
# process that is being torn down, or from one that does not speak our protocol.
_UNEXPLAINED = frozenset(
    (
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
    )
)
# These blame the caller, which is the gateway: unexplained, they are no fault of its client.
_BLAMES_THE_GATEWAY = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    )
)


def upstream_error(error: grpc.RpcError) -> MimoError:
    """The error behind a failed call. What a replica cannot explain, another may do better."""
    if not is_explained(error):
        if error.code() in _UNEXPLAINED:
            return Unavailable(f"the replica broke off: {error.code().name}")
        if error.code() in _BLAMES_THE_GATEWAY:
            return Internal(f"a replica refused the gateway: {error.code().name}")
    return from_rpc_error(error)


def garbage(component: str, what: object) -> Unavailable:
    """An answer that breaks the protocol: held against the replica, and asked for elsewhere."""
    return Unavailable(f"garbage from {component}: {what}")
