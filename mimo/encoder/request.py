"""What goes into an encode and what comes out. The encoder is all a service must write."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mimo.store import EmbeddingKey, Manifest, Modality, Outcome
from mimo.tensor import RawTensor

PlanT = TypeVar("PlanT")
PlanT_contra = TypeVar("PlanT_contra", contravariant=True)


class Encoder(Protocol[PlanT_contra]):
    """The arithmetic of one encoder. Knows nothing of keys, stores, queues or the wire."""

    def encode(self, items: Sequence[tuple[PlanT_contra, RawTensor]]) -> list[RawTensor]:
        """Encode one batch of (plan, payload); one embedding [num_tokens, D] per item, in order.

        Runs in the device thread, one call at a time. An exception from a batch of several makes
        the batcher call again with one item at a time, so a bad item fails alone.
        """


@dataclass(frozen=True, slots=True)
class EncodeRequest(Generic[PlanT]):
    """The header of one encode call: everything that is known before any payload byte."""

    key: EmbeddingKey
    encoder_fingerprint: str  # the encoder that ``key`` was computed for
    modality: Modality
    plan: PlanT
    cost: float  # in the component's unit of work: patches, or seconds of audio
    payload_dtype: str
    payload_shape: tuple[int, ...]
    attempt: int = 0  # counts re-dispatches of the same work
    bypass: bool = False  # encode even if the store has an entry, and replace it
    inline: bool = False  # return the embedding as well
    deadline: float = math.inf  # on the clock of time.monotonic


@dataclass(frozen=True, slots=True)
class Encoded:
    """An embedding exists: in the store under its key, and in ``tensor`` when that is not None.

    ``tensor`` is set when the caller asked for it or when the store could not take the entry.
    """

    manifest: Manifest
    outcome: Outcome
    encode_ms: float  # device time that this call caused; 0 for a hit or a join
    tensor: RawTensor | None = None

    @property
    def manifest_digest(self) -> bytes:
        return self.manifest.digest
