"""What clients' requests hold in memory, bounded for all of them together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mimo.errors import InvalidRequest, Overloaded, Reason

MAX_HELD_BYTES = 1 << 30

Hold = Callable[[int], None]


class HeldBytes:
    """Counts bodies, uploads and fetched media, as they come, for as long as they are needed."""

    def __init__(self, most: int = MAX_HELD_BYTES) -> None:
        self._most = most
        self._num_bytes = 0

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        """A counter of one request; what it has counted is free again after the block.

        Counting raises Overloaded when all requests would hold too much, and InvalidRequest
        (REQUEST_TOO_LARGE) when this one alone would.
        """
        held = 0

        def hold(num_bytes: int) -> None:
            nonlocal held
            if held + num_bytes > self._most:
                raise InvalidRequest(
                    f"one request may hold {self._most >> 20} MiB of media; send fewer or smaller",
                    reason=Reason.REQUEST_TOO_LARGE,
                    limit=self._most,
                )
            if self._num_bytes + num_bytes > self._most:
                raise Overloaded("too many large requests at once", retry_after_s=1.0)
            held += num_bytes
            self._num_bytes += num_bytes

        try:
            yield hold
        finally:
            self._num_bytes -= held
