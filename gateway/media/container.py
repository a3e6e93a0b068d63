"""Opening sound and video files with FFmpeg, as little of it as is needed.

FFmpeg knows hundreds of formats, among them playlists that make it read local files or open
sockets. So the format is forced and whitelisted, no protocol is allowed, and the bytes come from an
object that has no name.
"""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from gateway.media.faults import beyond
from gateway.media.limits import Limits
from gateway.media.sniff import Format
from mimo.errors import InvalidRequest, Reason

_OPEN_TIMEOUT_S = 5.0
_PROBE_LIMIT = "5000000"  # bytes read, and microseconds decoded, to find out about streams

_VIDEO_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"})
_AUDIO_CODECS = frozenset(
    {"aac", "mp3", "flac", "opus", "vorbis", "alac", "speex", "pcm_mulaw", "pcm_alaw", "pcm_u8"}
    | {
        f"pcm_{kind}{bits}{end}"
        for kind, bits in (("s", 16), ("s", 24), ("s", 32), ("s", 64))
        for end in ("le", "be")
    }
    | {f"pcm_f{bits}{end}" for bits in (32, 64) for end in ("le", "be")}
    | {"pcm_s8"}
)
_ENCRYPTED_TAGS = frozenset({"encv", "enca"})

_MAX_BAD_RUN = 10
_MAX_BAD_SHARE = 0.05


@contextmanager
def open_container(data: bytes, format: Format, limits: Limits) -> Iterator[InputContainer]:
    container = av.open(
        io.BytesIO(data),
        mode="r",
        format=format.opener,
        container_options={
            "format_whitelist": format.opener,
            "protocol_whitelist": "none",
            "probesize": _PROBE_LIMIT,
            "analyzeduration": _PROBE_LIMIT,
        },
        timeout=(_OPEN_TIMEOUT_S, _OPEN_TIMEOUT_S),
    )
    with container:
        if len(container.streams) > limits.max_streams:
            raise beyond(
                "streams",
                len(container.streams),
                limits.max_streams,
                f"file has {len(container.streams)} streams; the limit is {limits.max_streams}",
            )
        yield container


def find_audio(container: InputContainer) -> AudioStream | None:
    """The default sound track, else the first."""
    streams = container.streams.audio
    marked = [stream for stream in streams if Disposition.default in stream.disposition]
    return next(iter([*marked, *streams]), None)


def find_video(container: InputContainer) -> VideoStream | None:
    """The first picture track that is not cover art."""
    for stream in container.streams.video:
        if Disposition.attached_pic not in stream.disposition:
            return stream
    return None


def check_codec(stream: AudioStream | VideoStream) -> None:
    """Refuse codecs beyond the few that are expected and so well-trodden, and encryption."""
    context = stream.codec_context
    allowed = _VIDEO_CODECS if stream.type == "video" else _AUDIO_CODECS
    if context is not None and context.codec_tag in _ENCRYPTED_TAGS:
        raise InvalidRequest(f"{stream.type} is encrypted", reason=Reason.MEDIA_ENCRYPTED)
    if context is None or context.codec.canonical_name not in allowed:
        name = "unknown" if context is None else context.codec.canonical_name
        raise InvalidRequest(
            f"{stream.type} codec {name} is not supported", reason=Reason.MEDIA_UNSUPPORTED
        )


class PacketDecoder:
    """Decodes the packets of one stream, forgiving a few damaged ones.

    Raises InvalidRequest (MEDIA_CORRUPT) after ten damaged packets in a row, and from ``finish``
    when they are 5 % or more, or nothing was decoded.
    """

    def __init__(self, stream: AudioStream | VideoStream) -> None:
        self._stream = stream
        self._packets = self._bad = self._bad_run = self._frames = 0

    def decode(self, packet: "Packet[Any] | None") -> list[Any]:
        """Frames that became ready; None asks for the last ones."""
        self._packets += 1
        try:
            frames = self._stream.decode(packet)
        except av.error.EOFError:
            return []
        except av.error.MemoryError:
            raise
        except av.FFmpegError as error:
            self._bad += 1
            self._bad_run += 1
            if self._bad_run >= _MAX_BAD_RUN:
                raise self._corrupt() from error
            return []
        self._bad_run = 0
        self._frames += len(frames)
        return frames

    def decode_run(self, packets: "Iterable[Packet[Any]]") -> Iterator[Any]:
        """All frames of consecutive packets, the delayed ones too. Leaves the decoder ready for a
        run elsewhere in the file."""
        for packet in packets:
            yield from self.decode(packet)
        yield from self.decode(None)
        self._stream.codec_context.flush_buffers()

    def finish(self) -> None:
        """Judge the stream after its last packet."""
        if self._frames == 0 and self._bad == 0:
            raise InvalidRequest(f"{self._stream.type} is empty", reason=Reason.MEDIA_EMPTY)
        if self._frames == 0 or self._bad >= _MAX_BAD_SHARE * self._packets:
            raise self._corrupt()

    def _corrupt(self) -> InvalidRequest:
        return InvalidRequest(f"{self._stream.type} data is damaged", reason=Reason.MEDIA_CORRUPT)
