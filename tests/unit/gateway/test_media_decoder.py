"""The front: plan, then decode what was planned, in real workers."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gateway.items import AudioPlan, ImagePlan, MediaOptions, Modality, VideoPlan
from gateway.media.decoder import MediaDecoder
from gateway.media.limits import Limits
from gateway.media.processor import ProcessorConfig
from gateway.media.workers import WorkerPool
from mimo.errors import InvalidRequest, Reason
from mimo.media.resize import bilinear
from mimo.tensor import RawTensor
from tests.support.media import (
    encoded_audio,
    gradient,
    image_file,
    numbered_frames,
    tone,
    video_file,
    wav_file,
    with_orientation,
)

TOKENS = ("image", "video", "audio", "vision_start", "vision_end", "video_start", "video_end")
TOKENS += ("audio_start", "audio_end")
CONFIG = ProcessorConfig.from_checkpoint(
    {
        "processor_config": {
            **{f"{name}_token_id": number for number, name in enumerate(TOKENS, 1)},
            "image_min_pixels": 4096,
            "video_min_pixels": 4096,
            "fps": 1.0,
        }
    }
)
DEFAULTS = MediaOptions()


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(1)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


@pytest.fixture
def decoder(pool: WorkerPool) -> MediaDecoder:
    return MediaDecoder(pool, CONFIG, Limits())


def array(tensor: RawTensor) -> NDArray[Any]:
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


async def test_a_picture(decoder: MediaDecoder) -> None:
    png, bmp = (image_file(gradient(70, 100), format) for format in ("PNG", "BMP"))
    planned = await decoder.plan(png, DEFAULTS, expected=Modality.IMAGE)
    assert planned.content_digest is None
    assert isinstance(planned.plan, ImagePlan)
    assert planned.plan.grid_thw == (1, 4, 6)
    image = await decoder.decode_image(png, planned)
    assert np.array_equal(array(image.pixels), gradient(70, 100))
    other = await decoder.plan(bmp, DEFAULTS, expected=None)
    assert other.source_digest != planned.source_digest
    assert (await decoder.decode_image(bmp, other)).content_digest == image.content_digest


async def test_a_turned_picture(decoder: MediaDecoder) -> None:
    data = with_orientation(gradient(70, 100), 6)
    planned = await decoder.plan(data, DEFAULTS, expected=Modality.IMAGE)
    image = await decoder.decode_image(data, planned)
    assert image.pixels.shape == (100, 70, 3)
    ignoring = await decoder.plan(data, MediaOptions(exif=False), expected=Modality.IMAGE)
    assert (await decoder.decode_image(data, ignoring)).pixels.shape == (70, 100, 3)


async def test_a_sound(decoder: MediaDecoder) -> None:
    data = wav_file(tone(2.5, 16000), 16000)
    planned = await decoder.plan(data, DEFAULTS, expected=Modality.AUDIO)
    assert isinstance(planned.plan, AudioPlan)
    assert (planned.plan.num_samples, planned.plan.num_tokens) == (60000, 16)
    pieces = [array(piece) async for piece in decoder.decode_waveform(data, planned)]
    waveform = np.concatenate(pieces)
    assert len(pieces) > 1 and len(waveform) == 60000
    assert abs(waveform).max() == pytest.approx(0.5, abs=0.01)


async def test_a_video_with_a_shorter_sound(decoder: MediaDecoder) -> None:
    data = video_file(numbered_frames(40), rate=10, sound=tone(1.0))
    planned = await decoder.plan(data, DEFAULTS, expected=Modality.VIDEO)
    plan = planned.plan
    assert isinstance(plan, VideoPlan) and plan.sound is not None
    assert len(plan.frame_indices) == 8 and plan.grid_thw[0] == 4
    assert plan.sound_segments[0][1] > 0 and plan.sound_segments[-1][1] == 0
    assert plan.num_sound_tokens <= plan.sound.num_tokens
    frames = [array(frame) async for frame in decoder.decode_frames(data, planned)]
    assert (len(frames), *frames[0].shape) == plan.frames_shape
    levels = [round(float(frame.mean()) / 10) for frame in frames]
    assert levels == [n % 25 for n in plan.frame_indices]
    sound = [array(piece) async for piece in decoder.decode_waveform(data, planned)]
    assert len(np.concatenate(sound)) == plan.sound.num_samples


async def test_the_sound_of_a_video_is_the_same_item_as_alone(decoder: MediaDecoder) -> None:
    data = video_file(numbered_frames(4), sound=tone(0.5))
    video = await decoder.plan(data, DEFAULTS, expected=Modality.VIDEO)
    audio = await decoder.plan(data, DEFAULTS, expected=Modality.AUDIO)
    assert video.sound_digest == audio.content_digest
    silent = await decoder.plan(data, MediaOptions(use_audio_track=False), expected=Modality.VIDEO)
    assert silent.sound_digest is None
    assert silent.content_digest == video.content_digest


async def test_other_frames_are_other_content(decoder: MediaDecoder) -> None:
    data = video_file(numbered_frames(40))
    plans = [await decoder.plan(data, MediaOptions(num_frames=n), expected=None) for n in (2, 4)]
    assert plans[0].content_digest != plans[1].content_digest


async def test_large_frames_are_scaled_before_they_travel(decoder: MediaDecoder) -> None:
    picture = gradient(480, 640)
    data = video_file([picture] * 2)
    options = MediaOptions(max_pixels=4096)
    planned = await decoder.plan(data, options, expected=Modality.VIDEO)
    assert isinstance(planned.plan, VideoPlan)
    assert planned.plan.frame_dtype == "float32"
    frames = [array(frame) async for frame in decoder.decode_frames(data, planned)]
    assert (len(frames), *frames[0].shape) == planned.plan.frames_shape
    assert abs(frames[0] - bilinear(picture, *frames[0].shape[:2])).max() < 6


async def test_one_frame_and_half_a_second(decoder: MediaDecoder) -> None:
    single = video_file(numbered_frames(1))
    planned = await decoder.plan(single, DEFAULTS, expected=Modality.VIDEO)
    assert isinstance(planned.plan, VideoPlan)
    assert planned.plan.labels == ("00:00",)
    assert len([frame async for frame in decoder.decode_frames(single, planned)]) == 1
    short = video_file(numbered_frames(15))
    planned = await decoder.plan(short, DEFAULTS, expected=Modality.VIDEO)
    assert isinstance(planned.plan, VideoPlan)
    assert planned.plan.sound is None and planned.plan.sound_segments == ()


async def test_a_reader_may_stop_early(decoder: MediaDecoder) -> None:
    data = video_file(numbered_frames(30))
    planned = await decoder.plan(data, DEFAULTS, expected=Modality.VIDEO)
    async with aclosing(decoder.decode_frames(data, planned)) as frames:
        await anext(frames)
    assert len([frame async for frame in decoder.decode_frames(data, planned)]) == 8


async def test_a_container_of_sound_alone_is_audio_when_nobody_says(decoder: MediaDecoder) -> None:
    data = encoded_audio(tone(0.5), 24000, container="mp4", codec="aac")
    assert (await decoder.plan(data, DEFAULTS, expected=None)).modality is Modality.AUDIO
    with pytest.raises(InvalidRequest) as caught:
        await decoder.plan(data, DEFAULTS, expected=Modality.VIDEO)
    assert caught.value.reason == Reason.MEDIA_EMPTY


@pytest.mark.parametrize(
    ("data", "expected", "reason"),
    [
        (b"", Modality.IMAGE, Reason.MEDIA_EMPTY),
        (b"this is not a picture", Modality.IMAGE, Reason.MEDIA_UNSUPPORTED),
        (image_file(gradient(40, 40))[:80], Modality.IMAGE, Reason.MEDIA_CORRUPT),
        (wav_file(tone(0.1)), Modality.IMAGE, Reason.MEDIA_MODALITY),
        (wav_file(tone(0.1)[:0]), Modality.AUDIO, Reason.MEDIA_EMPTY),
    ],
)
async def test_bad_files(
    decoder: MediaDecoder, data: bytes, expected: Modality, reason: Reason
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        planned = await decoder.plan(data, DEFAULTS, expected=expected)
        await decoder.decode_image(data, planned)
    assert (caught.value.reason, caught.value.field) == (reason, None)


async def test_limits_travel_with_their_facts(decoder: MediaDecoder) -> None:
    data = image_file(gradient(40, 40))
    for source, limits, which in (
        (data, Limits(max_image_pixels=1599), "pixels"),
        (data, Limits(max_image_bytes=10), "bytes"),
        (video_file(numbered_frames(9)), Limits(max_video_frames=8), "frames"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await decoder.plan(source, DEFAULTS, expected=None, limits=limits)
        assert caught.value.reason == Reason.MEDIA_LIMIT
        assert caught.value.metadata["which"] == which


async def test_work_is_bounded_before_the_first_frame(decoder: MediaDecoder) -> None:
    data = video_file(numbered_frames(10))
    planned = await decoder.plan(data, DEFAULTS, expected=Modality.VIDEO)
    limits = Limits(max_decoded_pixels=10 * 48 * 64 - 1)
    with pytest.raises(InvalidRequest) as caught:
        await anext(decoder.decode_frames(data, planned, limits=limits))
    assert caught.value.metadata["which"] == "decoded_pixels"


async def test_options_are_checked(decoder: MediaDecoder) -> None:
    with pytest.raises(InvalidRequest):
        await decoder.plan(b"x", MediaOptions(fps=1, num_frames=2), expected=None)
