"""How a clip's mel frames are cut into the sequences that the tokenizer encodes.

Published servers pad the segments of one call to the longest, and the padding leaks into the last
codes of the shorter ones. The call of record is therefore fixed here as a function of the clip
alone: its own segments, at most :data:`CALL_FRAMES` per call. Other clips never matter, so codes
are deterministic and can be cached.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CALL_FRAMES = 256_000


@dataclass(frozen=True, slots=True)
class Segment:
    """An independent sequence of mel frames. ``is_short``: its call holds a longer one."""

    num_frames: int
    is_short: bool = False

    @property
    def num_positions(self) -> int:
        """Transformer positions: frames after the stride-2 convolution."""
        return -(-self.num_frames // 2)

    @property
    def num_codes(self) -> int:
        """Code frames: positions after the stride-2 pool."""
        return -(-self.num_positions // 2)


def plan_segments(
    num_frames: int, segment_frames: int, call_frames: int = CALL_FRAMES
) -> tuple[Segment, ...]:
    """Segments of one clip: full ones of ``segment_frames`` and a remainder.

    A call takes segments until the next would exceed ``call_frames``; only the remainder can be
    shorter than its neighbours, and only when it does not start a call of its own.
    """
    full, rest = divmod(num_frames, segment_frames)
    segments = [Segment(segment_frames)] * full
    if rest:
        per_call = max(call_frames // segment_frames, 1)
        in_last_call = full % per_call or min(full, per_call)
        room = call_frames - in_last_call * segment_frames
        segments.append(Segment(rest, is_short=full > 0 and rest <= room))
    return tuple(segments)


def passes(segments: Sequence[Segment], max_frames: int) -> Iterator[tuple[Segment, ...]]:
    """Consecutive runs of segments of at most ``max_frames`` frames (or one longer segment).

    Bounds the memory of a forward; the numbers do not depend on where the cuts fall.
    """
    run: list[Segment] = []
    num_frames = 0
    for segment in segments:
        if run and num_frames + segment.num_frames > max_frames:
            yield tuple(run)
            run, num_frames = [], 0
        run.append(segment)
        num_frames += segment.num_frames
    if run:
        yield tuple(run)
