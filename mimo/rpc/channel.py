"""Client channels between our processes."""

import grpc

from mimo.logs import request_id
from mimo.rpc.interceptors import REQUEST_ID_KEY

MAX_MESSAGE_BYTES = 8 << 20

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A frozen peer is noticed within half a minute even while nothing is being said.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Re-dispatch is the caller's decision (another replica, a retry budget), never the channel's.
    ("grpc.enable_retries", 0),
    # A restarted replica is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, how long an attempt to connect may take: a busy server greets late.
    ("grpc.min_reconnect_backoff_ms", 3_000),
)


def open_channel(target: str) -> grpc.aio.Channel:
    """A channel to one replica (``host:port``). Must be made inside a running event loop."""
    return grpc.aio.insecure_channel(target, options=_OPTIONS)


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata of an outgoing call: the request id of the task that makes it."""
    current = request_id()
    return ((REQUEST_ID_KEY, current),) if current else ()
