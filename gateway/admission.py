"""Who is let in, decided when a request's first bytes arrive: before its body is read or anything
is done for it.

Whoever is let in has a place from then on. Places count as work that decoders are going to get, so
that a crowd which comes at once is not let in because nobody has counted it yet.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from gateway.recent import RecentMean
from gateway.routing import ReplicaPool
from gateway.vitals import LoopLag

# Of the time that is left: predictions err, and what is let in and not finished is for nothing. A
# shorter queue keeps decoders as busy.
MARGIN = 0.5
# A request with a picture waits for a hundred rounds of the event loop on its way, one of text for
# sixty, and rounds get longer while they wait: twice that is counted. Long rounds are held against
# newcomers when there is a crowd here; with few, it is the machine that is slow.
LOOP_WAITS = 200
CROWD = 32
# What leaves at the deadline arrives after it. Ours is earlier by so much, or by this share of the
# time if that is less.
DELIVERY_S, DELIVERY_SHARE = 0.05, 0.01
# A place is kept for so long, and what everything here takes longer, while the rest of a request is
# on its way. Who is slower may still come in, but nobody is turned away for the sake of heads
# without a body.
UNREAD_S = 1.0


class Place:
    """A request's right to be answered by ``deadline``, on the clock of its gateway."""

    def __init__(self, pool: ReplicaPool, deadline: float) -> None:
        self.deadline = deadline
        self._pool = pool
        self._expected = ExitStack()

    def hold(self, num_sequences: float, for_s: float | None = None) -> None:
        """Be counted as so many sequences that a decoder will get, for a while or until it leaves.
        Needs a running event loop."""
        self.leave()
        self._expected.enter_context(self._pool.expecting(num_sequences))
        if for_s is not None:
            timer = asyncio.get_running_loop().call_later(for_s, self.leave)
            self._expected.callback(timer.cancel)

    def leave(self) -> None:
        """Be counted no longer: a decoder has the work, or nobody will."""
        self._expected.close()


class Admission:
    """Gives out places before the decoders."""

    def __init__(
        self,
        llm: ReplicaPool,
        max_timeout_s: float,
        lag: LoopLag,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._llm = llm
        self._max_timeout_s = max_timeout_s
        self._lag = lag
        self._num_inside = 0
        self._clock = clock
        self._preparations = {has_media: RecentMean(clock) for has_media in (False, True)}

    @contextmanager
    def place(self, timeout_s: float) -> Iterator[Place]:
        """A place while the block runs. Raises Overloaded when no decoder could answer in time,
        should the request be of the kind that takes longest to prepare."""
        timeout_s = min(timeout_s, self._max_timeout_s)
        here_s = max(lately.seconds for lately in self._preparations.values())
        if self._num_inside >= CROWD:
            here_s = max(here_s, LOOP_WAITS * self._lag.seconds)
        self._llm.check_room(MARGIN * timeout_s - here_s)
        delivery_s = min(DELIVERY_S, DELIVERY_SHARE * timeout_s)
        place = Place(self._llm, self._clock() + timeout_s - delivery_s)
        place.hold(1.0, UNREAD_S + here_s)
        self._num_inside += 1
        try:
            yield place
        finally:
            self._num_inside -= 1
            place.leave()

    def confirm(
        self, place: Place, num_sequences: float, *, has_media: bool, wait_s: float = 0.0
    ) -> None:
        """Look again, now that it is known how many sequences are wanted and what has to be done
        before a decoder gets them; ``wait_s`` until that can begin. Raises Overloaded.

        Without the margin: whoever was let in stays unless it has become hopeless.
        """
        preparation_s = max(self._preparations[has_media].seconds, wait_s)
        place.leave()
        self._llm.check_room(place.deadline - self._clock() - preparation_s)
        place.hold(num_sequences)

    def prepared(self, place: Place, seconds: float, *, has_media: bool) -> None:
        """A decoder gets the work now, after so long."""
        self._preparations[has_media].add(seconds)
        place.leave()
