"""A decoder whose next token is a formula, so that expected outputs are computed by hand.

Embeddings are numbers: token t is the row [t], an encoder row is whatever number it holds. With
``history`` 0 the token after t is 3 t + 1 (mod V). Otherwise it also counts ``history`` x (the sum
of all numbers so far + twice the sum of those a sliding layer sees). The sums come out of uniform
attention over the cache, so a lost, stale or misplaced slot changes the answer.

The MTP guesses 3 u + 1 from the token u it is given: right for ``history`` 0 at depths below
``num_right``, and one too many at the others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mimo.nn.attention import AttentionSelector
from mimo.nn.attention.base import AttentionNeeds, Sink
from services.llm.engine.block_manager import BlockManager
from services.llm.engine.core import EngineCore
from services.llm.engine.drafter import Drafter
from services.llm.engine.kv_cache import KVCache, KVLayout
from services.llm.engine.loop import Engine
from services.llm.engine.request import Request, SamplingParams
from services.llm.engine.runner import Runner
from services.llm.engine.sampler import Sampler
from services.llm.engine.scheduler import Scheduler
from services.llm.model.attention import Attend
from services.llm.model.config import LayerSpec

VOCAB = 97
VISIBLE = 7  # keys a sliding layer sees


def spec(index: int, *, sliding: bool) -> LayerSpec:
    """One head of width 1."""
    return LayerSpec(index, sliding, 1, 1, 1, 1, 0, 1.0, False, False)


def next_token(numbers: Sequence[float], history: int) -> int:
    """The formula, over the numbers at all positions so far."""
    own, seen = 3 * numbers[-1] + 1, sum(numbers) + 2 * sum(numbers[-VISIBLE:])
    return round(own + history * seen) % VOCAB


def continuation(numbers: Sequence[float], count: int, history: int) -> list[int]:
    """The ``count`` tokens that follow."""
    sequence = list(numbers)
    for _ in range(count):
        sequence.append(next_token(sequence, history))
    return [round(number) for number in sequence[len(numbers) :]]


class ToyDecoder:
    """Stands in for the real decoder and its seam. Layer 0 sees everything, layer 1 a window."""

    def __init__(self, history: int = 1) -> None:
        self.history = history
        self.poisoned: set[int] = set()  # tokens whose logits become NaN
        self.failure: Exception | None = None  # raised by the next pass
        selector = AttentionSelector("toy", override="reference")
        self._full = selector.select(_needs(None), "full")
        self._sliding = selector.select(_needs(VISIBLE - 1), "sliding")

    def embed(self, ids: Tensor) -> Tensor:
        return ids.double()[:, None]  # [T, 1]

    def __call__(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if self.failure is not None:
            raise self.failure
        v = x[:, :, None]  # [T, 1, 1]
        q = torch.zeros_like(v)
        count = (positions + 1).double()
        total = attend(0, self._full, q, q, v, None).flatten() * count  # mean x count
        recent = attend(1, self._sliding, q, q, v, None).flatten() * count.clamp(max=VISIBLE)
        number = 3 * x[:, 0] + 1 + self.history * (total + 2 * recent)
        number = number.round() % VOCAB
        number[[round(value) in self.poisoned for value in x[:, 0].tolist()]] = torch.nan
        return number[:, None]  # [T, 1]

    def logits(self, hidden: Tensor) -> Tensor:
        return -((torch.arange(VOCAB) - hidden) ** 2)  # [T, V]


class ToyMtp:
    def __init__(self, num_right: int, num_blocks: int = 3) -> None:
        self.layers = [None] * num_blocks
        self.fails = False
        self.num_right = num_right
        self._sliding = AttentionSelector("toy", override="reference").select(
            _needs(VISIBLE - 1), "sliding"
        )

    def layer(
        self, depth: int, x: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        if self.fails:
            raise RuntimeError("drafting is broken")
        v = x[:, :, None]
        attend(2 + depth, self._sliding, torch.zeros_like(v), torch.zeros_like(v), v, None)
        return (3 * x + 1 + (depth >= self.num_right)) % VOCAB  # [T, 1]


def build_core(
    decoder: Any,
    mtp: Any = None,
    *,
    layers: Sequence[LayerSpec] | None = None,
    visible: int = VISIBLE,
    kv_bytes: int = 1 << 20,
    num_blocks: Mapping[str, int] | None = None,
    block_size: int = 4,
    max_running: int = 8,
    max_step_tokens: int = 16,
    max_context: int = 512,
    dtype: torch.dtype = torch.float64,
    make_runner: Callable[..., Runner] = Runner,
) -> EngineCore:
    """An engine without a thread, around a toy or a real decoder.

    ``num_blocks`` by layer group takes the place of what ``kv_bytes`` would give.
    """
    depth = 0 if mtp is None else len(mtp.layers)
    if layers is None:
        layers = [spec(0, sliding=False), *(spec(1 + n, sliding=True) for n in range(1 + depth))]
    layout = KVLayout(tuple(layers), visible, depth, block_size, dtype)
    limits = {
        "max_running": max_running,
        "max_step_tokens": max_step_tokens,
        "max_context": max_context,
    }
    groups = layout.groups(kv_bytes, **limits)
    if num_blocks is not None:
        groups = tuple(replace(g, num_blocks=num_blocks[g.name]) for g in groups)
    runner = make_runner(decoder, mtp, KVCache(layout, groups, "cpu"), "cpu")
    sampler = Sampler()
    return EngineCore(
        Scheduler(BlockManager(groups, block_size, lookahead=depth), **limits),
        runner,
        sampler,
        None if mtp is None else Drafter(runner, sampler, max_draft_tokens=depth),
    )


def make_request(prompt_ids: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
    """Options of SamplingParams and of Request, by name; ``prior_output_ids`` come first."""
    prior = list(options.pop("prior_output_ids", ()))
    fields = {name: options.pop(name) for name in list(options) if name in Request.__slots__}
    return Request(
        request_id=str(fields.pop("request_id", "r")),
        token_ids=[*prompt_ids, *prior],
        num_prompt_tokens=len(prompt_ids),
        params=SamplingParams(max_tokens=max_tokens, **options),
        **fields,
    )


def run_all(core: EngineCore, requests: Sequence[Request]) -> list[list[int]]:
    """Run requests to their end together. Returns what each produced here."""
    first = [request.num_tokens for request in requests]
    for request in requests:
        core.scheduler.check(request)
        core.add(request)
    while core.scheduler.num_unfinished:
        assert core.step().plan.scheduled, "nothing can run"
    return [request.token_ids[start:] for request, start in zip(requests, first, strict=True)]


@asynccontextmanager
async def running_engine(core: EngineCore, **options: Any) -> AsyncIterator[Engine]:
    """The engine with its thread."""
    engine = Engine(core, **options)
    engine.start(asyncio.get_running_loop())
    try:
        yield engine
    finally:
        await engine.stop()


def _needs(left: int | None) -> AttentionNeeds:
    return AttentionNeeds(
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        v_head_dim=1,
        scale=1.0,
        causal=True,
        left=left,
        right=0,
        sink=Sink.NONE,
        paged=True,
        dtype=torch.float64,
        device="cpu",
    )
