"""Which packets of a video must be decoded to see the chosen frames.

A key frame starts a group of pictures that needs nothing from before it. Groups without a chosen
frame are skipped, and a group is decoded only as far as its last chosen frame. Pure planning over
what demuxing tells: no decoder is involved.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PacketInfo:
    """One packet in file order. ``pts`` is when its frame is shown, in time-base units."""

    pts: int | None
    is_key: bool
    is_shown: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Packets ``start`` to ``stop`` of the file, decoded together; ``frames`` maps the time of each
    chosen frame among them to its index."""

    start: int
    stop: int
    frames: dict[int, int]


def plan_runs(packets: Sequence[PacketInfo], frame_indices: Sequence[int]) -> list[Run] | None:
    """The runs that show ``frame_indices`` (ascending), in order.

    None when frames cannot be told apart by their times, or a chosen one does not exist: then the
    file must be decoded from its start.
    """
    times = [(packet.pts, at) for at, packet in enumerate(packets) if packet.is_shown]
    if any(pts is None for pts, _ in times) or len({pts for pts, _ in times}) < len(times):
        return None
    order = [at for _, at in sorted(times, key=lambda entry: entry[0] or 0)]
    if frame_indices[-1] >= len(order):
        return None
    keys = [at for at, packet in enumerate(packets) if packet.is_key] or [0]
    runs: list[Run] = []
    for index in frame_indices:
        at = order[index]
        pts = packets[at].pts or 0
        start = _group_start(packets, keys, at, pts)
        if runs and start <= runs[-1].stop:
            last = runs[-1]
            runs[-1] = Run(last.start, max(last.stop, at + 1), {**last.frames, pts: index})
        else:
            runs.append(Run(start, at + 1, {pts: index}))
    return runs


def _group_start(packets: Sequence[PacketInfo], keys: list[int], at: int, pts: int) -> int:
    """Where to begin so that the packet at ``at`` decodes.

    A frame that is stored after a key frame but shown before it may still need the group before.
    """
    group = bisect.bisect_right(keys, at) - 1
    if group > 0 and pts < (packets[keys[group]].pts or 0):
        group -= 1
    return keys[group] if group >= 0 else 0
