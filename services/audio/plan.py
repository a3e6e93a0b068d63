"""What is known about a clip before its samples arrive."""

from dataclasses import dataclass
from enum import Enum

from mimo.errors import InvalidRequest, Reason


class Product(Enum):
    """What a caller wants from a clip."""

    EMBEDDINGS = "embeddings"  # [tokens, hidden] in the model's dtype
    CODES = "codes"  # [frames, codebooks] int16


@dataclass(frozen=True, slots=True)
class AudioPlan:
    """One clip of mono float32 samples at ``sample_rate``, the tokenizer's."""

    num_samples: int
    sample_rate: int
    product: Product = Product.EMBEDDINGS

    @classmethod
    def of(
        cls,
        dtype: str,
        shape: tuple[int, ...],
        sample_rate: int,
        *,
        expected_rate: int,
        max_seconds: float,
        product: Product = Product.EMBEDDINGS,
    ) -> "AudioPlan":
        """Plan a clip from the header of its upload.

        Raises InvalidRequest for another rate or layout, an empty clip (MEDIA_EMPTY) and one
        longer than ``max_seconds`` (MEDIA_LIMIT).
        """
        if sample_rate != expected_rate:
            raise InvalidRequest(
                f"the waveform has {sample_rate} samples per second; this encoder takes "
                f"{expected_rate}",
                field="sample_rate",
                expected=expected_rate,
            )
        if dtype != "float32" or len(shape) != 1:
            raise InvalidRequest(
                f"a waveform is float32 [num_samples], got {dtype}{list(shape)}", field="waveform"
            )
        if shape[0] == 0:
            raise InvalidRequest(
                "the waveform holds no samples", reason=Reason.MEDIA_EMPTY, field="waveform"
            )
        plan = cls(shape[0], sample_rate, product)
        if plan.seconds > max_seconds:
            raise InvalidRequest(
                f"the clip lasts {plan.seconds:.1f} s; the limit is {max_seconds:g} s",
                reason=Reason.MEDIA_LIMIT,
                field="waveform",
                limit=max_seconds,
            )
        return plan

    @property
    def seconds(self) -> float:
        """Length of the clip, and the cost of encoding it."""
        return self.num_samples / self.sample_rate
