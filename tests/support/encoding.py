"""An encoder whose embeddings are known in advance, and the calls that ask for them."""

import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from mimo.encoder import EncodeRequest
from mimo.store import EmbeddingKey, Modality
from mimo.tensor import Chunk, RawTensor, split

FINGERPRINT = "e0" * 32


class CountingEncoder:
    """Embeds a payload as its bytes, one bfloat16 row [1, 2] per four of them. Plan -1 is bad."""

    def __init__(self, device_s: float = 0.0) -> None:
        self.num_encoded = 0
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self._device_s = device_s

    def encode(self, items: Sequence[tuple[int, RawTensor]]) -> list[RawTensor]:
        self.gate.wait()
        time.sleep(self._device_s)
        if any(plan == -1 for plan, _ in items):
            raise ZeroDivisionError("bad plan")
        self.num_encoded += len(items)
        self.batches.append(len(items))
        return [embedding_of(payload) for _, payload in items]


class Upload:
    """The chunks of a payload, counting those that were read."""

    def __init__(self, payload: RawTensor, chunk_bytes: int = 8) -> None:
        self._chunks = split(payload, chunk_bytes)
        self.num_read = 0

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        chunk = next(self._chunks, None)
        if chunk is None:
            raise StopAsyncIteration
        self.num_read += 1
        return chunk


def payload_of(value: int, num_bytes: int = 32) -> RawTensor:
    return RawTensor("uint8", (num_bytes,), bytes([value]) * num_bytes)


def embedding_of(payload: RawTensor) -> RawTensor:
    return RawTensor("bfloat16", (payload.num_bytes // 4, 2), payload.data)


def request_of(key: EmbeddingKey, payload: RawTensor, **changes: Any) -> EncodeRequest[int]:
    fields: dict[str, Any] = {
        "key": key,
        "encoder_fingerprint": FINGERPRINT,
        "modality": Modality.IMAGE,
        "plan": 0,
        "cost": 1.0,
        "payload_dtype": payload.dtype,
        "payload_shape": payload.shape,
    }
    return EncodeRequest(**{**fields, **changes})
