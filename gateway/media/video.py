"""Videos, by FFmpeg: frames counted by their packets, then the chosen ones one at a time.

Runs in a media worker. Frames are numbered from 0 in the order they are shown.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from gateway.media.audio import AudioTrack
from gateway.media.container import (
    PacketDecoder,
    check_codec,
    find_audio,
    find_video,
    open_container,
)
from gateway.media.facts import AudioFacts, VideoFacts
from gateway.media.faults import beyond, decoding
from gateway.media.groups import PacketInfo, Run, plan_runs
from gateway.media.limits import Limits
from gateway.media.orientation import UPRIGHT, orientation_of_matrix, turn
from gateway.media.sniff import Format
from mimo.errors import InvalidRequest, MimoError, Reason
from mimo.media.resize import bilinear

T = TypeVar("T")

_MIN_RATE, _MAX_RATE = 0.1, 240.0  # frames per second a header may plausibly claim
_HD_HEIGHT = 720  # from here on an unmarked picture is BT.709, below BT.601


def probe_video(
    data: bytes, format: Format, *, use_audio_track: bool | None, limits: Limits
) -> VideoFacts:
    """Read every packet: count the frames, decode the first, and decode the sound to count it.

    A broken sound track counts as none unless ``use_audio_track`` is True.
    """
    with decoding("video"), open_container(data, format, limits) as container:
        stream = _require(find_video(container))
        sound = None if use_audio_track is False else find_audio(container)
        pictures = _PictureTrack(stream, limits)
        track = _SoundTrack(sound, use_audio_track is True, limits)
        streams = [stream] if sound is None else [stream, sound]
        for packet in container.demux(*streams):
            if packet.stream is stream:
                pictures.add(packet)
            else:
                track.add(packet)
        return pictures.facts(track.facts())


def decode_frames(
    data: bytes,
    format: Format,
    *,
    stream_index: int,
    frame_indices: Sequence[int],
    source_size: tuple[int, int],
    target_size: tuple[int, int] | None,
    orientation: int,
    limits: Limits,
) -> Iterator[NDArray[Any]]:
    """The frames of ``frame_indices`` (ascending), turned upright: [H, W, 3].

    uint8 at ``source_size`` (height, width after turning), or float32 at ``target_size``. Only
    what these frames need is decoded. A file that turns out to end early repeats its last frame.
    """
    renderer = _Renderer(source_size, target_size, orientation)
    open_track = _Opener(data, format, stream_index, limits)
    with decoding("video"):
        runs = plan_runs(open_track.index(), frame_indices)
        num_packets = sum(run.stop - run.start for run in runs) if runs else frame_indices[-1] + 1
        _check_work(num_packets, source_size, limits)
        shown = 0
        for frame in _frames_of_runs(open_track, runs) if runs else ():
            yield renderer.render(frame)
            shown += 1
        if shown < len(frame_indices):
            _check_work(frame_indices[-1] + 1, source_size, limits)
            for frame in _frames_in_order(open_track, frame_indices[shown:]):
                yield renderer.render(frame)


class _Opener:
    """Opens the same stream of the same file again and again, always from its start."""

    def __init__(self, data: bytes, format: Format, stream_index: int, limits: Limits) -> None:
        self._data = data
        self._format = format
        self._stream_index = stream_index
        self._limits = limits

    def index(self) -> list[PacketInfo]:
        """What every packet is, without decoding any."""
        with open_container(self._data, self._format, self._limits) as container:
            stream = _require(container.streams[self._stream_index])
            return [
                PacketInfo(packet.pts, packet.is_keyframe, _is_shown(packet, stream))
                for packet in container.demux(stream)
                if packet.size
            ]

    @contextmanager
    def packets(self) -> "Iterator[tuple[Iterator[Packet[Any]], PacketDecoder]]":
        """All packets and a decoder for them."""
        with open_container(self._data, self._format, self._limits) as container:
            stream = _require(container.streams[self._stream_index])
            _prepare(stream, self._limits)
            decoder = PacketDecoder(stream)
            yield (packet for packet in container.demux(stream) if packet.size), decoder


def _frames_of_runs(open_track: _Opener, runs: Sequence[Run]) -> Iterator[VideoFrame]:
    """The chosen frames of the runs, recognised by their times.

    Ends early at the first run that does not show all of its frames: some streams cannot be
    entered at their key frames.
    """
    with open_track.packets() as (packets, decoder):
        position = 0
        for run in runs:
            missing = dict(run.frames)
            feed = itertools.islice(packets, run.start - position, run.stop - position)
            position = run.stop
            for frame in decoder.decode_run(feed):
                if missing.pop(frame.pts, None) is not None:
                    yield frame
            if missing:
                return


def _frames_in_order(open_track: _Opener, frame_indices: Sequence[int]) -> Iterator[VideoFrame]:
    """The chosen frames by counting from the start, the last one again when the file ends early."""
    wanted = iter(frame_indices)
    index = next(wanted, None)
    frame: VideoFrame | None = None
    with open_track.packets() as (packets, decoder):
        for number, frame in enumerate(decoder.decode_run(packets)):
            if number == index:
                yield frame
                index = next(wanted, None)
            if index is None:
                return
        decoder.finish()
        while index is not None and frame is not None:
            yield frame
            index = next(wanted, None)


class _PictureTrack:
    """Counts the frames of a stream and decodes only the first."""

    def __init__(self, stream: VideoStream, limits: Limits) -> None:
        _prepare(stream, limits)
        self._stream = stream
        self._limits = limits
        self._decoder = PacketDecoder(stream)
        self._first: VideoFrame | None = None
        self._num_frames = 0
        self._times: list[int] = []  # of the first and the last packets, in time-base units

    def add(self, packet: "Packet[Any]") -> None:
        if self._first is None:
            self._first = next(iter(self._decoder.decode(packet)), None)
        if not _is_shown(packet, self._stream):
            return
        self._num_frames += 1
        if packet.pts is not None:
            self._times = [*self._times[:1], packet.pts]
        if self._num_frames > self._limits.max_video_frames:
            raise beyond(
                "frames",
                f"over {self._limits.max_video_frames}",
                self._limits.max_video_frames,
                f"video has more than {self._limits.max_video_frames} frames",
            )

    def facts(self, sound: AudioFacts | None) -> VideoFacts:
        if self._num_frames == 0:
            raise InvalidRequest("video holds no frames", reason=Reason.MEDIA_EMPTY)
        if self._first is None:
            raise InvalidRequest("video cannot be decoded", reason=Reason.MEDIA_CORRUPT)
        rate = self._frame_rate()
        if self._num_frames / rate > self._limits.max_video_s:
            raise beyond(
                "video_duration_s",
                self._num_frames / rate,
                self._limits.max_video_s,
                f"video lasts {self._num_frames / rate:.0f} seconds; "
                f"the limit is {self._limits.max_video_s:g}",
            )
        _check_size(self._first.height, self._first.width, self._limits)
        return VideoFacts(
            stream_index=self._stream.index,
            height=self._first.height,
            width=self._first.width,
            orientation=_orientation(self._first),
            num_frames=self._num_frames,
            frame_rate=rate,
            sound=sound,
        )

    def _frame_rate(self) -> float:
        """The average rate if it is plausible, else FFmpeg's guess, else by the clock."""
        for claimed in (self._stream.average_rate, self._stream.guessed_rate):
            if claimed and _MIN_RATE <= claimed <= _MAX_RATE:
                return float(claimed)
        if len(self._times) == 2 and self._times[1] > self._times[0] and self._stream.time_base:
            seconds = float((self._times[1] - self._times[0]) * self._stream.time_base)
            return self._num_frames / seconds
        return 1.0


class _SoundTrack:
    """A video's sound, dropped at the first error unless it is required."""

    def __init__(self, stream: Any, required: bool, limits: Limits) -> None:
        self._required = required
        self._track: AudioTrack | None = None
        if stream is not None:
            self._attempt(lambda: self._open(stream, limits))

    def add(self, packet: "Packet[Any]") -> None:
        track = self._track
        if track is not None:
            self._attempt(lambda: track.add(packet))

    def facts(self) -> AudioFacts | None:
        track = self._track
        return None if track is None else self._attempt(track.facts)

    def _open(self, stream: Any, limits: Limits) -> None:
        self._track = AudioTrack(stream, limits)

    def _attempt(self, step: Callable[[], T]) -> T | None:
        try:
            with decoding("sound track"):
                return step()
        except MimoError:
            if self._required:
                raise
            self._track = None
            return None


class _Renderer:
    """From a decoder's frame to upright RGB."""

    def __init__(
        self, source_size: tuple[int, int], target_size: tuple[int, int] | None, orientation: int
    ) -> None:
        height, width = source_size
        self._stored = (width, height) if orientation >= 5 else (height, width)
        self._target = target_size
        self._orientation = orientation
        self._reformatter = VideoReformatter()  # keeps swscale's tables between frames

    def render(self, frame: VideoFrame) -> NDArray[Any]:
        height, width = self._stored
        unmarked = frame.colorspace not in tuple(Colorspace)
        rgb = self._reformatter.reformat(
            frame,
            width=width,
            height=height,  # a stream may change its size; the plan does not
            format="rgb24",
            src_colorspace=Colorspace.ITU709 if unmarked and frame.height >= _HD_HEIGHT else None,
            threads=1,
        )
        upright = turn(rgb.to_ndarray(), self._orientation)  # [H, W, 3]
        if self._target is not None:
            return bilinear(upright, *self._target)
        return np.ascontiguousarray(upright)


def _require(stream: Any) -> VideoStream:
    if not isinstance(stream, VideoStream):
        raise InvalidRequest("file holds no pictures", reason=Reason.MEDIA_EMPTY)
    return stream


def _prepare(stream: VideoStream, limits: Limits) -> None:
    """Check what the header says and set up the decoder, before the first packet."""
    check_codec(stream)
    _check_size(stream.codec_context.height, stream.codec_context.width, limits)
    stream.codec_context.thread_count = 1
    # The size may change midway; the decoder itself watches the area.
    stream.codec_context.options = {"max_pixels": str(limits.max_frame_pixels)}


def _check_size(height: int, width: int, limits: Limits) -> None:
    if height * width > limits.max_frame_pixels:
        raise beyond(
            "frame_pixels",
            height * width,
            limits.max_frame_pixels,
            f"video is {width}x{height}; the limit is {limits.max_frame_pixels / 1e6:g} megapixels",
        )
    if max(height, width) > limits.max_frame_side:
        raise beyond(
            "frame_side",
            max(height, width),
            limits.max_frame_side,
            f"video is {width}x{height}; the limit of a side is {limits.max_frame_side}",
        )


def _check_work(num_packets: int, size: tuple[int, int], limits: Limits) -> None:
    pixels = num_packets * size[0] * size[1]
    if pixels > limits.max_decoded_pixels:
        raise beyond(
            "decoded_pixels",
            pixels,
            limits.max_decoded_pixels,
            f"video has {pixels / 1e9:.1f} gigapixels to decode; "
            f"the limit is {limits.max_decoded_pixels / 1e9:g}",
        )


def _is_shown(packet: "Packet[Any]", stream: VideoStream) -> bool:
    """Whether a packet is a frame that will be seen.

    Not: the empty packet at the end, packets an edit list cuts off, and VP8's hidden reference
    frames, which say so in the fifth bit of their first byte.
    """
    if packet.size == 0 or packet.is_discard:
        return False
    return stream.codec_context.codec.canonical_name != "vp8" or bool(bytes(packet)[0] & 0x10)


def _orientation(frame: VideoFrame) -> int:
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    return UPRIGHT if matrix is None else orientation_of_matrix(bytes(matrix))
