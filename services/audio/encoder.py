"""The audio stack as the device thread runs it: a batch of clips in, one tensor per clip out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mimo.errors import InvalidRequest
from mimo.nn.interop import from_torch, to_torch
from mimo.tensor import RawTensor
from services.audio.model import AudioTower
from services.audio.plan import AudioPlan, Product


class AudioEncoder:
    """Encodes clips of many requests at once; some may only want their codes."""

    def __init__(self, tower: AudioTower, device: str) -> None:
        self._tower = tower
        self._device = device

    @torch.inference_mode()
    def encode(self, items: Sequence[tuple[AudioPlan, RawTensor]]) -> list[RawTensor]:
        """The product each plan asks for, in order. Raises InvalidRequest for NaN or infinity."""
        codes = self._tower.tokenize([self._waveform(payload) for _, payload in items])
        wanted = [plan.product is Product.EMBEDDINGS for plan, _ in items]
        to_embed = [clip for clip, is_wanted in zip(codes, wanted, strict=True) if is_wanted]
        embeddings = iter(self._tower.embed(to_embed) if to_embed else ())
        return [
            from_torch(next(embeddings) if is_wanted else clip.to(torch.int16))
            for clip, is_wanted in zip(codes, wanted, strict=True)
        ]

    def _waveform(self, payload: RawTensor) -> Tensor:
        waveform = to_torch(payload).to(self._device)  # [samples]
        if not waveform.isfinite().all():
            raise InvalidRequest("the waveform holds NaN or infinity", field="waveform")
        return waveform
