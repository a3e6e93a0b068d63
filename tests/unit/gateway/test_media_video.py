"""Videos: frames counted by packets and found by number, in every container, however odd."""

import numpy as np
import pytest
from numpy.typing import NDArray

from gateway.media.facts import VideoFacts
from gateway.media.groups import PacketInfo, Run, plan_runs
from gateway.media.limits import Limits
from gateway.media.sniff import MP4, sniff
from gateway.media.video import decode_frames, probe_video
from mimo.errors import InvalidRequest, Reason
from mimo.media.resize import bilinear
from tests.support.media import (
    encoded_audio,
    gradient,
    image_file,
    numbered_frames,
    tone,
    video_file,
)

LIMITS = Limits()


def probe(data: bytes, use_audio_track: bool | None = None, limits: Limits = LIMITS) -> VideoFacts:
    return probe_video(data, sniff(data), use_audio_track=use_audio_track, limits=limits)


def frames(
    data: bytes, *indices: int, target: tuple[int, int] | None = None
) -> list[NDArray[np.generic]]:
    facts = probe(data)
    size = (facts.height, facts.width)
    return list(
        decode_frames(
            data,
            sniff(data),
            stream_index=facts.stream_index,
            frame_indices=indices,
            source_size=size[::-1] if facts.orientation >= 5 else size,
            target_size=target,
            orientation=facts.orientation,
            limits=LIMITS,
        )
    )


def levels(data: bytes, *indices: int) -> list[int]:
    """The numbers of numbered frames, from their grey."""
    return [round(float(frame.mean()) / 10) for frame in frames(data, *indices)]


def refused(data: bytes, limits: Limits = LIMITS) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        probe(data, None, limits)
    return caught.value


FRAGMENTED = {"movflags": "frag_keyframe+empty_moov"}


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "libx264", None),
        ("mp4", "libx264", FRAGMENTED),
        ("mp4", "mpeg4", None),
        ("mov", "mjpeg", None),
        ("matroska", "libx264", None),
        ("webm", "libvpx", None),
        ("webm", "libvpx-vp9", None),
        ("webm", "libsvtav1", None),
        ("webm", "libvpx", {"live": "1"}),
        ("avi", "mjpeg", None),
    ],
)
def test_containers_and_codecs(container: str, codec: str, options: dict[str, str] | None) -> None:
    height, width = (64, 64) if codec == "libsvtav1" else (48, 64)
    data = video_file(
        numbered_frames(20, height, width),
        rate=10,
        container=container,
        codec=codec,
        container_options=options,
    )
    facts = probe(data)
    assert (facts.num_frames, facts.height, facts.width) == (20, height, width)
    assert facts.frame_rate == pytest.approx(10, rel=0.02)
    assert facts.sound is None
    assert levels(data, 0, 7, 19) == [0, 7, 19]


def test_reordered_frames_are_numbered_as_shown() -> None:
    options = {"crf": "0", "bf": "3", "g": "8", "x264-params": "b-adapt=0:log-level=none"}
    data = video_file(numbered_frames(24), options=options)
    assert levels(data, *range(0, 24, 3)) == list(range(0, 24, 3))


GROUPS = {"crf": "0", "g": "8", "keyint_min": "8", "bf": "2"}
X264 = "scenecut=0:b-adapt=0:log-level=none"


@pytest.mark.parametrize("open_gop", [0, 1])
def test_groups_without_a_chosen_frame_are_skipped(open_gop: int) -> None:
    """Frames around every border between groups, which may be open: shown before their key frame
    but stored after it."""
    options = {**GROUPS, "x264-params": f"{X264}:open-gop={open_gop}"}
    data = video_file(numbered_frames(64), options=options)
    every = [round(float(frame.mean()) / 10) for frame in frames(data, *range(64))]
    assert every == [n % 25 for n in range(64)]
    for index in range(64):
        assert levels(data, index) == [index % 25]
    for chosen in ((0, 63), (7, 8, 9), (6, 23, 24, 41, 42), (31, 32, 55, 56, 57)):
        assert levels(data, *chosen) == [n % 25 for n in chosen]


def test_skipping_saves_work() -> None:
    data = video_file(numbered_frames(64), options={**GROUPS, "x264-params": X264})
    limits = Limits(max_decoded_pixels=24 * 48 * 64)  # three groups of eight
    arguments = {
        "stream_index": 0,
        "source_size": (48, 64),
        "target_size": None,
        "orientation": 1,
        "limits": limits,
    }
    chosen = decode_frames(data, MP4, frame_indices=(0, 30, 56), **arguments)
    assert [round(float(frame.mean()) / 10) for frame in chosen] == [0, 5, 6]
    with pytest.raises(InvalidRequest) as caught:
        list(decode_frames(data, MP4, frame_indices=range(0, 64, 4), **arguments))
    assert caught.value.metadata["which"] == "decoded_pixels"


def test_runs_of_packets() -> None:
    """I B P | I P, stored as I P B | I P; the second I is shown after a B that needs it."""
    packets = [
        PacketInfo(pts, key, True)
        for pts, key in ((0, True), (20, False), (10, False), (40, True), (30, False), (50, False))
    ]
    assert plan_runs(packets, [0]) == [Run(0, 1, {0: 0})]
    assert plan_runs(packets, [1]) == [Run(0, 3, {10: 1})]
    assert plan_runs(packets, [4]) == [Run(3, 4, {40: 4})]
    assert plan_runs(packets, [3]) == [Run(0, 5, {30: 3})]  # leads the second group
    assert plan_runs(packets, [0, 5]) == [Run(0, 1, {0: 0}), Run(3, 6, {50: 5})]
    assert plan_runs(packets, [6]) is None
    assert plan_runs([PacketInfo(None, True, True)], [0]) is None
    assert plan_runs([PacketInfo(7, True, True)] * 2, [0]) is None


def test_hidden_reference_frames_are_not_counted() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 64, 3), dtype=np.uint8)
    options = {"auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good", "b": "400k"}
    smooth = [np.clip(frame // 8 + 4 * n, 0, 255).astype(np.uint8) for n, frame in enumerate(noise)]
    data = video_file(smooth, container="webm", codec="libvpx", options=options)
    assert probe(data).num_frames == 40


def test_colours_are_right() -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 30, 60)]
    pictures = [np.full((48, 64, 3), colour, np.uint8) for colour in colours]
    decoded = frames(video_file(pictures), *range(6))
    for frame, colour in zip(decoded, colours, strict=True):
        assert abs(frame.reshape(-1, 3).astype(int) - colour).max() <= 3


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_display_rotation_is_applied(rotation: int) -> None:
    """Counter-clockwise, as phones write it."""
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:24, :32] = 255
    data = video_file([picture] * 2, rotation=rotation)
    (frame,) = frames(data, 0)
    expected = np.rot90(picture, rotation // 90)
    assert frame.shape == expected.shape
    assert abs(frame.astype(int) - expected).max() <= 3


def test_frames_can_be_scaled_here() -> None:
    data = video_file([gradient(48, 64)] * 2)
    (whole,) = frames(data, 1)
    (scaled,) = frames(data, 1, target=(32, 32))
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled, bilinear(whole, 32, 32))


def test_one_frame() -> None:
    data = video_file(numbered_frames(1))
    assert probe(data).num_frames == 1
    assert levels(data, 0) == [0]


def test_half_a_second() -> None:
    assert probe(video_file(numbered_frames(15))).num_frames == 15


def test_sound_is_found_or_left_alone() -> None:
    data = video_file(numbered_frames(30), sound=tone(0.4))
    sound = probe(data).sound
    assert sound is not None
    assert (sound.stream_index, sound.sample_rate) == (1, 24000)
    assert 9600 <= sound.num_samples < 12000
    assert probe(data, use_audio_track=False).sound is None
    assert probe(video_file(numbered_frames(2)), use_audio_track=True).sound is None


def test_a_broken_sound_track_spoils_only_those_who_ask_for_it() -> None:
    loud = np.full(4800, 100.0)
    data = video_file(numbered_frames(4), container="matroska", sound=loud, sound_codec="pcm_f32le")
    assert probe(data).sound is None
    with pytest.raises(InvalidRequest) as caught:
        probe(data, use_audio_track=True)
    assert caught.value.reason == Reason.MEDIA_CORRUPT


def test_variable_rate_counts_frames_and_not_time() -> None:
    data = video_file(numbered_frames(6), rate=30, pts=[0, 1, 2, 3, 4, 3000])
    facts = probe(data)
    assert facts.num_frames == 6
    assert facts.frame_rate > 0
    assert levels(data, 5) == [5]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded_audio(tone(0.2), 24000, container="mp4", codec="aac"), Reason.MEDIA_EMPTY),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavc1" + bytes(200), Reason.MEDIA_CORRUPT),
        (b"\x1aE\xdf\xa3" + bytes(200), Reason.MEDIA_CORRUPT),
        (b"RIFF\0\0\1\0AVI " + bytes(200), Reason.MEDIA_CORRUPT),
        (video_file(numbered_frames(20))[:400], Reason.MEDIA_CORRUPT),
        (video_file(numbered_frames(2), container="mov", codec="qtrle"), Reason.MEDIA_UNSUPPORTED),
    ],
)
def test_bad_files(data: bytes, reason: Reason) -> None:
    assert refused(data).reason == reason


def test_limits() -> None:
    data = video_file(numbered_frames(20), rate=10)
    for which, limits in {
        "frame_pixels": Limits(max_frame_pixels=48 * 64 - 1),
        "frame_side": Limits(max_frame_side=63),
        "frames": Limits(max_video_frames=19),
        "video_duration_s": Limits(max_video_s=1.9),
        "streams": Limits(max_streams=0),
    }.items():
        error = refused(data, limits)
        assert (error.reason, error.metadata["which"]) == (Reason.MEDIA_LIMIT, which)


def test_a_file_that_ends_early_repeats_its_last_frame() -> None:
    data = video_file(numbered_frames(10))
    assert levels(data, 2, 9, 11, 15) == [2, 9, 9, 9]


@pytest.mark.parametrize(
    "text",
    [
        b"ffconcat version 1.0\nfile secret.mp4\n",
        b"#EXTM3U\n#EXTINF:1,\nsecret.ts\n",
        image_file(gradient(8, 8), "GIF"),
    ],
)
def test_playlists_open_nothing_even_past_the_sniffer(text: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        probe_video(text, MP4, use_audio_track=None, limits=LIMITS)
    assert caught.value.reason == Reason.MEDIA_CORRUPT


def test_damaged_files_decode_or_are_refused() -> None:
    data = video_file(numbered_frames(12), sound=tone(0.4))
    rng = np.random.default_rng(2)
    for _ in range(40):
        damaged = bytearray(data)
        for position in rng.integers(32, len(data), 6):
            damaged[position] = rng.integers(0, 256)
        try:
            levels(bytes(damaged), 0, 5, 11)
        except InvalidRequest as error:
            assert error.reason.startswith("MEDIA_")
