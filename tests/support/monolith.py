"""The whole model in one process, straight through its modules.

What the split system must agree with bit for bit. There is no engine, scheduler, store, servicer or
gateway here, and none of their code: media are arrays, the prompt is spelled out piece by piece,
and the sequence runs alone, the whole prompt at once and then token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from mimo.checkpoint.index import CheckpointIndex
from mimo.nn.attention import AttentionSelector
from mimo.nn.linear import pack_weights, packing_for
from services.audio.weights import AudioCheckpoint
from services.llm.model.weights import load_decoder
from services.vision.plan import VisionPlan
from services.vision.preprocess import Preprocessor
from services.vision.weights import load_vision_tower, read_tower_config
from tests.support.sequence_cache import SequenceCache

PATCH = 16
UNIT = 32  # pixels a token covers along one side

# Never said: what stands for media, and what opens a turn. The tags of thinking and tools may be.
UNSPEAKABLE = (
    *("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|mimo_video_start|>", "<|mimo_video_end|>"),
    *("<|mimo_audio_start|>", "<|mimo_audio_end|>"),
    *("<|im_start|>", "<tool_response>", "</tool_response>"),
)


@dataclass(frozen=True)
class Mark:
    """A control token, by its text."""

    text: str


@dataclass(frozen=True)
class Rows:
    """Embeddings [M, D] in the place of as many pads."""

    pad: str
    rows: Tensor


Piece = str | Mark | Rows


@dataclass(frozen=True)
class Said:
    """A sampled token and the log-softmax of its raw logit."""

    id: int
    logprob: float


class Monolith:
    """One checkpoint on the CPU in one dtype."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        index = CheckpointIndex.open(directory)
        config = read_tower_config(index)
        self._tower = load_vision_tower(
            index,
            config,
            dtype=dtype,
            device="cpu",
            selector=AttentionSelector("vision", override=None),
        )
        self._preprocess = Preprocessor(config, "cpu")
        self._audio = AudioCheckpoint.open(directory).load(
            dtype=dtype, device="cpu", selector=AttentionSelector("audio", override=None)
        )
        self._decoder, _ = load_decoder(
            index, dtype=dtype, device="cpu", selector=AttentionSelector("llm", override=None)
        )
        if (packing := packing_for(dtype, "cpu")) is not None:  # other kernels, other last bits
            pack_weights(self._decoder, packing)
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    @torch.inference_mode()
    def see(self, frames: NDArray[np.uint8]) -> Tensor:
        """Embeddings of frames [F, H, W, 3]; a picture is one frame. -> [M, D].

        Scaled to the nearest multiples of a token's side, which is all there is to it as long as
        the result is within the model's budget of pixels.
        """
        num_frames, height, width, _ = frames.shape
        target_height, target_width = round(height / UNIT) * UNIT, round(width / UNIT) * UNIT
        grid = (-(-num_frames // 2), target_height // PATCH, target_width // PATCH)
        plan = VisionPlan(num_frames, height, width, target_height, target_width, grid)
        return self._tower(self._preprocess(torch.from_numpy(frames), plan), [grid])

    @torch.inference_mode()
    def hear(self, samples: NDArray[np.float32]) -> Tensor:
        """Embeddings of mono samples [S] at 24 kHz. -> [M, D]."""
        return self._audio([torch.from_numpy(samples)])[0]

    def prompt(self, pieces: Sequence[Piece]) -> tuple[list[int], list[tuple[int, Tensor]]]:
        """Ids with pads in place, and (first position, rows) of the embeddings."""
        ids: list[int] = []
        embeddings = []
        for piece in pieces:
            match piece:
                case Mark(text):
                    ids.append(self._tokenizer.token_to_id(text))
                case Rows(pad, rows):
                    embeddings.append((len(ids), rows))
                    ids += [self._tokenizer.token_to_id(pad)] * len(rows)
                case text:
                    ids += self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids, embeddings

    @torch.inference_mode()
    def answer(self, pieces: Sequence[Piece], num_tokens: int) -> list[Said]:
        """Greedy continuation, past any end of turn."""
        ids, embeddings = self.prompt(pieces)
        x = self._decoder.embed(torch.tensor(ids))  # [T, D]
        for start, rows in embeddings:
            x[start : start + len(rows)] = rows
        cache = SequenceCache()
        said: list[Said] = []
        while len(said) < num_tokens:
            positions = torch.arange(cache.start, cache.start + len(x))
            hidden = self._decoder(x, positions, cache)  # [T, D]
            cache.start += len(x)
            said.append(self._choose(self._decoder.logits(hidden[-1:])[0].float()))
            x = self._decoder.embed(torch.tensor([said[-1].id]))  # [1, D]
        return said

    def _choose(self, logits: Tensor) -> Said:
        """logits: [V]."""
        allowed = logits[: self._tokenizer.get_vocab_size()].clone()
        allowed[[self._tokenizer.token_to_id(text) for text in UNSPEAKABLE]] = float("-inf")
        best = int(allowed.argmax())
        return Said(best, float(logits.log_softmax(dim=-1)[best]))


def user_turn(*content: Piece) -> list[Piece]:
    """A single question in the model's chat format, thinking off. Content begins with media."""
    return [
        *(Mark("<|im_start|>"), "user\n", *content, Mark("<|im_end|>")),
        *(Mark("<|im_start|>"), "assistant\n", Mark("<think>"), Mark("</think>")),
    ]


def picture(rows: Tensor) -> list[Piece]:
    return [Mark("<|vision_start|>"), Rows("<|image_pad|>", rows), Mark("<|vision_end|>")]


def sound(rows: Tensor) -> list[Piece]:
    return [Mark("<|mimo_audio_start|>"), Rows("<|audio_pad|>", rows), Mark("<|mimo_audio_end|>")]


def grid(label: str, rows: Tensor) -> list[Piece]:
    """Two frames of a video under their time."""
    return [
        *(label, Mark("<|vision_start|>"), Rows("<|video_pad|>", rows), Mark("<|vision_end|>")),
    ]


def video(*content: Piece) -> list[Piece]:
    return [Mark("<|mimo_video_start|>"), *content, Mark("<|mimo_video_end|>")]
