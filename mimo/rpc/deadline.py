"""When a call ends, as its handler sees it."""

import math
import time
from typing import Any

import grpc


def deadline_of(context: "grpc.aio.ServicerContext[Any, Any]") -> float:
    """The call's deadline on the clock of ``time.monotonic``; infinite when it has none."""
    remaining_s = context.time_remaining()
    return math.inf if remaining_s is None else time.monotonic() + remaining_s
