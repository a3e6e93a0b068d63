"""Lengths of sound: samples, mel frames and tokens."""

from gateway.items import AudioPlan
from gateway.media.processor import MEL_FRAMES_PER_CODE, MEL_HOP_LENGTH, ProcessorConfig
from mimo.errors import InvalidRequest, Reason
from mimo.media.resample import resampled_length

# The spectrogram reflects 480 samples at both ends, which needs one more than that.
MIN_SAMPLES = 481


def plan_audio(
    *,
    stream_index: int,
    source_rate: int,
    source_channels: int,
    num_source_samples: int,
    config: ProcessorConfig,
) -> AudioPlan:
    """Plan a clip of ``num_source_samples`` per channel. Raises InvalidRequest when it is empty."""
    if num_source_samples == 0:
        raise InvalidRequest("audio holds no samples", reason=Reason.MEDIA_EMPTY)
    sample_rate = config.audio_sampling_rate
    num_samples = max(MIN_SAMPLES, resampled_length(num_source_samples, source_rate, sample_rate))
    num_mel_frames = 1 + num_samples // MEL_HOP_LENGTH
    num_codes = -(-num_mel_frames // MEL_FRAMES_PER_CODE)
    return AudioPlan(
        stream_index=stream_index,
        source_rate=source_rate,
        source_channels=source_channels,
        sample_rate=sample_rate,
        num_samples=num_samples,
        num_mel_frames=num_mel_frames,
        num_tokens=-(-num_codes // config.audio_group_size),
    )
