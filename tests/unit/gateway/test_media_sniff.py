"""Formats are recognised by their bytes; whatever else somebody calls media is refused."""

import pytest

from gateway.items import Modality
from gateway.media.sniff import sniff
from mimo.errors import InvalidRequest, Reason
from tests.support.media import (
    encoded_audio,
    gradient,
    image_file,
    numbered_frames,
    tone,
    video_file,
    wav_file,
)

ID3 = b"ID3\x04\0\0\0\0\0\x05hello"


@pytest.mark.parametrize("format", ["jpeg", "png", "gif", "webp", "bmp", "tiff", "avif"])
def test_pictures(format: str) -> None:
    assert sniff(image_file(gradient(8, 8), format), Modality.IMAGE).name == format


@pytest.mark.parametrize(
    ("container", "codec", "name"),
    [
        ("flac", "flac", "flac"),
        ("ogg", "libopus", "ogg"),
        ("mp3", "libmp3lame", "mp3"),
        ("adts", "aac", "aac"),
        ("mp4", "aac", "mp4"),
        ("webm", "libopus", "matroska"),
        ("aiff", "pcm_s16be", "aiff"),
    ],
)
def test_sound(container: str, codec: str, name: str) -> None:
    data = encoded_audio(tone(0.1, 48000), 48000, container=container, codec=codec)
    assert sniff(data, Modality.AUDIO).name == name


@pytest.mark.parametrize(
    ("container", "codec", "name"),
    [("mp4", "libx264", "mp4"), ("webm", "libvpx", "matroska"), ("avi", "mjpeg", "avi")],
)
def test_videos(container: str, codec: str, name: str) -> None:
    data = video_file(numbered_frames(2), container=container, codec=codec)
    assert sniff(data, Modality.VIDEO).name == name


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (ID3 + b"fLaC", "flac"),
        (ID3 + b"\xff\xf1\x50\x80", "aac"),
        (ID3 + b"\xff\xfb\x90\x00", "mp3"),
        (b"\xff\xfb\x90\x00", "mp3"),
        (b"RF64\0\0\0\0WAVEfmt ", "wav"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavc1", "mp4"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "avif"),
        (b"\0\0\0\x08moov", "mp4"),
        (b"II+\0\x08\0\0\0", "tiff"),
    ],
)
def test_bare_signatures(data: bytes, name: str) -> None:
    assert sniff(data).name == name


@pytest.mark.parametrize(
    "data",
    [
        b"just text in a file called picture.png",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<html><body>404</body></html>",
        b"%PDF-1.7",
        b"PK\x03\x04",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1/seg.ts\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nm=video 5004 RTP/AVP 96\n",
        b"<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011'/>",
        b"RIFX\0\0\0\0WAVE",
        b"RIFF\0\0\0\0ACON",
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        b"8BPS\0\1",
        b"%!PS-Adobe-3.0 EPSF",
        b"#!AMR\n",
        b"FLV\1\5",
        b"G" + b"\0" * 400,
        b"\xff",
        b"\0",
    ],
)
def test_everything_else_is_refused(data: bytes) -> None:
    for expected in (None, *Modality):
        with pytest.raises(InvalidRequest) as caught:
            sniff(data, expected)
        assert caught.value.reason == Reason.MEDIA_UNSUPPORTED


def test_no_bytes() -> None:
    with pytest.raises(InvalidRequest) as caught:
        sniff(b"")
    assert caught.value.reason == Reason.MEDIA_EMPTY


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (wav_file(tone(0.1)), Modality.IMAGE),
        (wav_file(tone(0.1)), Modality.VIDEO),
        (image_file(gradient(8, 8)), Modality.AUDIO),
        (image_file(gradient(8, 8), "GIF"), Modality.VIDEO),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavc1", Modality.IMAGE),
    ],
)
def test_a_known_format_of_another_kind_is_named(data: bytes, expected: Modality) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sniff(data, expected)
    assert caught.value.reason == Reason.MEDIA_MODALITY
