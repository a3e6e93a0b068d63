"""Sound: counted by decoding, mixed by the plain mean, broken or hostile files refused."""

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gateway.media.audio import decode_waveform, probe_audio, to_float
from gateway.media.facts import AudioFacts
from gateway.media.limits import Limits
from gateway.media.payload import wav_from_pcm16
from gateway.media.sniff import WAV, sniff
from mimo.errors import InvalidRequest, Reason
from mimo.media.resample import resample, resampled_length
from tests.support.media import encoded_audio, numbered_frames, tone, video_file, wav_file

LIMITS = Limits()


def probe(data: bytes, limits: Limits = LIMITS) -> AudioFacts:
    return probe_audio(data, sniff(data), limits)


def waveform(data: bytes, num_samples: int | None = None) -> NDArray[np.float32]:
    facts = probe(data)
    if num_samples is None:
        num_samples = resampled_length(facts.num_samples, facts.sample_rate, 24000)
    pieces = decode_waveform(
        data,
        sniff(data),
        stream_index=facts.stream_index,
        sample_rate=24000,
        num_samples=num_samples,
        limits=LIMITS,
    )
    return np.concatenate(list(pieces))


def refused(data: bytes, limits: Limits = LIMITS) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        probe(data, limits)
    return caught.value


def test_mono_at_the_models_rate_comes_through_unchanged() -> None:
    samples = tone(0.3)
    decoded = waveform(wav_file(samples, floating=True))
    assert np.array_equal(decoded, samples.astype(np.float32))


def test_stereo_is_the_mean_and_not_three_decibels_louder() -> None:
    both = np.full((2400, 2), 0.5)
    assert (waveform(wav_file(both)) == 0.5).all()
    opposed = np.stack([np.full(2400, 0.5), np.full(2400, -0.5)], axis=1)
    assert (waveform(wav_file(opposed)) == 0.0).all()


def test_many_channels_without_names() -> None:
    samples = np.tile(np.linspace(-0.7, 0.7, 8), (1000, 1))
    facts = probe(wav_file(samples, 48000))
    assert (facts.channels, facts.num_samples, facts.sample_rate) == (8, 1000, 48000)
    assert abs(waveform(wav_file(samples, floating=True))).max() < 1e-6


def test_other_rates_are_resampled() -> None:
    samples = tone(3.7, 44100)
    decoded = waveform(wav_file(samples, 44100, floating=True))
    assert np.array_equal(decoded, resample(samples.astype(np.float32), 44100, 24000))


def test_short_clips_are_padded_to_the_plan() -> None:
    decoded = waveform(wav_file(np.full(100, 0.25)), num_samples=481)
    assert len(decoded) == 481
    assert (decoded[:100] == 0.25).all() and (decoded[100:] == 0).all()


def test_equal_samples_share_a_digest_whatever_the_file() -> None:
    samples = np.round(tone(0.5, 48000) * 32768) / 32768
    digests = {
        probe(wav_file(samples, 48000)).content_digest,
        probe(wav_file(samples, 48000, floating=True)).content_digest,
        probe(encoded_audio(samples, 48000, container="flac", codec="flac")).content_digest,
    }
    assert len(digests) == 1
    assert probe(wav_file(samples, 44100)).content_digest not in digests


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("flac", "flac"),
        ("ogg", "libopus"),
        ("ogg", "vorbis"),
        ("mp3", "libmp3lame"),
        ("adts", "aac"),
        ("mp4", "aac"),
        ("mp4", "alac"),
        ("webm", "libopus"),
        ("matroska", "flac"),
        ("aiff", "pcm_s16be"),
        ("wav", "pcm_s24le"),
        ("wav", "pcm_mulaw"),
    ],
)
def test_containers_and_codecs(container: str, codec: str) -> None:
    layout = "stereo" if codec == "vorbis" else "mono"
    samples = tone(1.0, 48000)
    if layout == "stereo":
        samples = np.stack([samples, samples], axis=1)
    data = encoded_audio(samples, 48000, container=container, codec=codec, layout=layout)
    facts = probe(data)
    assert facts.sample_rate == 48000
    assert 48000 <= facts.num_samples <= 48000 + 4096
    decoded = waveform(data)
    assert abs(np.sqrt(np.mean(decoded[2400:-2400] ** 2)) - 0.3535) < 0.03


def test_the_sound_of_a_video() -> None:
    data = video_file(numbered_frames(4), sound=tone(0.5))
    facts = probe(data)
    assert facts.sample_rate == 24000
    assert 12000 <= facts.num_samples <= 14000


def test_streaming_recorders_write_no_length() -> None:
    whole = wav_file(tone(0.5))
    for size in (0, 0xFFFFFFFF):
        header = bytearray(whole)
        header[40:44] = struct.pack("<I", size)
        assert probe(bytes(header)).num_samples == 12000
    assert 5990 <= probe(whole[: 44 + 12001]).num_samples <= 6000  # cut off in mid-sample


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wav_file(np.zeros(0)), Reason.MEDIA_EMPTY),
        (wav_file(tone(0.1))[:20], Reason.MEDIA_CORRUPT),
        (wav_file(np.array([0.1, np.nan, 0.2]), floating=True), Reason.MEDIA_CORRUPT),
        (wav_file(np.array([0.1, np.inf]), floating=True), Reason.MEDIA_CORRUPT),
        (wav_file(np.array([0.1, 33.0]), floating=True), Reason.MEDIA_CORRUPT),
        (wav_file(tone(0.1), 1000), Reason.MEDIA_LIMIT),
        (wav_file(tone(0.1), 400_000), Reason.MEDIA_LIMIT),
        (wav_file(np.zeros((100, 33))), Reason.MEDIA_LIMIT),
        (video_file(numbered_frames(2)), Reason.MEDIA_EMPTY),
        (b"fLaC" + bytes(100), Reason.MEDIA_CORRUPT),
        (b"OggS" + bytes(100), Reason.MEDIA_CORRUPT),
        (b"ID3\x04\0\0\0\0\0\0" + bytes(2000), Reason.MEDIA_CORRUPT),
        (b"\0\0\0\x18ftypM4A \0\0\0\0" + bytes(100), Reason.MEDIA_CORRUPT),
    ],
)
def test_bad_files(data: bytes, reason: Reason) -> None:
    assert refused(data).reason == reason


def test_loud_but_finite_is_not_clipped() -> None:
    assert waveform(wav_file(np.array([0.5, -3.0, 31.0]), floating=True)).tolist() == [
        *(0.5, -3.0, 31.0),
    ]


def test_length_is_counted_and_not_believed() -> None:
    limits = Limits(max_audio_s=0.2)
    assert probe(wav_file(tone(1.1)), limits).num_samples == 26400  # a second of grace
    assert refused(wav_file(tone(1.3)), limits).metadata["which"] == "audio_duration_s"


@pytest.mark.parametrize(
    ("tag", "bits"),
    [(0x1234, 16), (2, 4), (6, 8)],  # unknown, ADPCM (not on the list), A-law (on the list)
)
def test_codecs_beyond_the_list(tag: int, bits: int) -> None:
    data = bytearray(wav_from_pcm16(bytes(2048), 24000))
    data[20:22] = struct.pack("<H", tag)
    data[32:36] = struct.pack("<HH", max(1, bits // 8), bits)
    if tag == 6:
        assert probe(bytes(data)).num_samples == 2048
    else:
        assert refused(bytes(data)).reason in (Reason.MEDIA_UNSUPPORTED, Reason.MEDIA_CORRUPT)


PLAYLISTS = [
    b"ffconcat version 1.0\nfile secret.wav\n",
    b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.wav\n",
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
]


@pytest.mark.parametrize("text", PLAYLISTS)
def test_playlists_open_nothing_even_past_the_sniffer(text: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        probe_audio(text, WAV, LIMITS)
    assert caught.value.reason == Reason.MEDIA_CORRUPT


def test_damaged_packets_are_forgiven_only_when_few() -> None:
    data = bytearray(encoded_audio(tone(4.0, 48000), 48000, container="flac", codec="flac"))
    few = bytearray(data)
    few[len(data) // 2] ^= 0xFF
    assert probe(bytes(few)).num_samples > 0
    for position in range(len(data) // 10, len(data), 200):
        data[position : position + 100] = bytes(100)
    assert refused(bytes(data)).reason == Reason.MEDIA_CORRUPT


@pytest.mark.parametrize(
    ("array", "format", "expected"),
    [
        (np.array([[0, 128, 255]], np.uint8), "u8", [[-1.0], [0.0], [127 / 128]]),
        (np.array([[-32768, 16384]], np.int16), "s16", [[-1.0], [0.5]]),
        (np.array([[-32768, 16384]], np.int16), "s16", [[-1.0], [0.5]]),
        (np.array([[1 << 30, -(1 << 31)]], np.int32), "s32", [[0.5], [-1.0]]),
        (np.array([[1 << 62]], np.int64), "s64", [[0.5]]),
        (np.array([[0.25, 0.5]], np.float64), "dbl", [[0.25], [0.5]]),
        (np.array([[0.1, 0.2], [0.3, 0.4]], np.float32), "fltp", [[0.1, 0.3], [0.2, 0.4]]),
    ],
)
def test_sample_formats(array: NDArray[Any], format: str, expected: list[list[float]]) -> None:
    channels = len(expected[0])
    samples = to_float(array, format, channels)
    assert samples.dtype == np.float32
    np.testing.assert_array_equal(samples, np.array(expected, np.float32))
    if not format.endswith("p"):
        stereo = to_float(np.repeat(array, 2, axis=1), format, 2)
        np.testing.assert_array_equal(stereo, np.repeat(samples, 2, axis=1))
