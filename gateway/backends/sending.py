"""Writing to a call whose peer may answer and leave at any moment."""

import asyncio
import contextlib
from typing import Any

import grpc
from google.protobuf.message import Message


async def send(call: Any, message: Message) -> bool:
    """Write one message to a streaming call; False when the call is over.

    Why the call ended is told by its status, which ``call.write`` would destroy: when a peer ends
    the call while a write waits for room, it overwrites whatever status the peer sent with INTERNAL
    (about one early answer in five). The operation below it does not, and is the same otherwise.
    """
    with contextlib.suppress(grpc.RpcError):
        await call.wait_for_connection()
    if call.done():
        return False
    try:
        await call._cython_call.send_serialized_message(message.SerializeToString())
    except Exception:  # Core's error types have no public names
        return False
    return True


def is_cancelled() -> bool:
    """Whether the running task shall end. A call that we break off looks the same to its reader,
    who then goes on with another."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
