"""Lengths of every stage, and the call of record that decides which segment counts as short."""

import pytest

from services.audio.segments import Segment, passes, plan_segments


@pytest.mark.parametrize(
    ("num_samples", "frames", "positions", "codes", "tokens"),
    [
        (481, 3, 2, 1, 1),
        (2400, 11, 6, 3, 1),
        (24000, 101, 51, 26, 7),
        (240000, 1001, 501, 251, 63),
        (1440000, 6001, 3001, 1501, 376),
        (7200000, 30001, 15001, 7501, 1876),
    ],
)
def test_lengths_of_a_clip(num_samples, frames, positions, codes, tokens):
    assert 1 + num_samples // 240 == frames
    segments = plan_segments(frames, 6000)
    assert sum(segment.num_frames for segment in segments) == frames
    assert sum(segment.num_positions for segment in segments) == positions
    assert sum(segment.num_codes for segment in segments) == codes
    assert -(-codes // 4) == -(-frames // 16) == tokens


def test_one_segment_is_never_short():
    assert plan_segments(1, 6000) == (Segment(1),)
    assert plan_segments(6000, 6000) == (Segment(6000),)


def test_remainder_beside_a_full_segment_is_short():
    assert plan_segments(6001, 6000) == (Segment(6000), Segment(1, is_short=True))
    assert plan_segments(12077, 6000) == (*[Segment(6000)] * 2, Segment(77, is_short=True))


@pytest.mark.parametrize(
    ("full", "rest", "is_short"),
    [
        (42, 4000, True),  # 256,000 frames in one call, exactly
        (42, 4001, False),  # a call of its own
        (43, 5999, True),  # the 43rd opened a second call
        (84, 4001, False),
    ],
)
def test_remainder_that_opens_a_call_is_not_short(full, rest, is_short):
    segments = plan_segments(full * 6000 + rest, 6000)
    assert segments == (*[Segment(6000)] * full, Segment(rest, is_short))


def test_passes_keep_order_and_respect_their_limit():
    segments = [Segment(frames) for frames in (4, 4, 3, 10, 1, 1)]
    runs = list(passes(segments, 8))
    assert [[segment.num_frames for segment in run] for run in runs] == [[4, 4], [3], [10], [1, 1]]
