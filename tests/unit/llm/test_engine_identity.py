"""Token identity: whatever the engine does, a token is the one that a plain pass would choose.

The rows cover every pair of values of batch size, chunk size, prefix cache, drafts and disturbance.
Each output is checked against the model itself: one pass over prompt and output without a cache,
by torch's products and dense attention, then logits / temperature + noise at every position. A
token may differ only where the two best scores are equal to four digits, and in less than one of
ten thousand.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mimo.checkpoint.directory import model_directory
from mimo.checkpoint.index import CheckpointIndex
from mimo.nn.attention import AttentionSelector
from mimo.nn.linear import pack_weights, packing_for
from services.llm.engine import acceptance, scheduler
from services.llm.engine.core import EngineCore
from services.llm.engine.noise import gumbel
from services.llm.engine.request import Request, Span
from services.llm.engine.scheduler import Plan
from services.llm.model.attention import FullSequences
from services.llm.model.decoder import Decoder, merge_embeddings
from services.llm.model.mtp import Mtp
from services.llm.model.weights import load_decoder
from tests.support.toy_decoder import build_core, make_request

Disturbance = Literal["undisturbed", "preempted", "resumed"]
Row = tuple[int, int, bool, int, Disturbance]

NEAR_TIE = 1e-4  # of the better score
RARE = 1e-4  # of all tokens
BLOCK = 16

# batch, tokens per step, prefix cache, drafts, disturbance
ROWS: list[Row] = [
    (16, 32, False, 0, "undisturbed"),
    (1, 512, True, 0, "preempted"),
    (16, 512, True, 0, "resumed"),
    (16, 512, True, 1, "undisturbed"),
    (16, 32, False, 1, "preempted"),
    (1, 32, False, 1, "resumed"),
    (16, 512, False, 2, "undisturbed"),
    (1, 32, False, 2, "preempted"),
    (1, 512, True, 2, "resumed"),
    (1, 512, False, 3, "undisturbed"),
    (16, 32, False, 3, "preempted"),
    (16, 32, True, 3, "resumed"),
]


@dataclass(frozen=True)
class Prompt:
    """``media``: (first position, rows [n, D], key) of each item."""

    ids: tuple[int, ...]
    media: tuple[tuple[int, Tensor, str], ...]
    temperature: float
    seed: int

    def request(self, max_tokens: int, **options: Any) -> Request:
        return make_request(
            self.ids,
            max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            spans=tuple(Span(i, at, len(rows), 0) for i, (at, rows, _) in enumerate(self.media)),
            item_rows={i: rows for i, (_, rows, _) in enumerate(self.media)},
            item_keys=tuple(key for _, _, key in self.media),
            **options,
        )


def load(attention: str | None) -> tuple[Decoder, Mtp]:
    selector = AttentionSelector("llm", override=attention)
    index = CheckpointIndex.open(model_directory(""))
    decoder, mtp = load_decoder(index, dtype=torch.float32, device="cpu", selector=selector)
    assert mtp is not None
    return decoder, mtp


@pytest.fixture(scope="module")
def plain() -> Decoder:
    return load("reference")[0]


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, Mtp]:
    decoder, mtp = load(None)
    packing = packing_for(torch.float32, "cpu")
    if packing is not None:  # as they are served
        pack_weights(decoder, packing)
        pack_weights(mtp, packing)
    return decoder, mtp


def make_prompts(decoder: Decoder, count: int) -> list[Prompt]:
    """Six in ten with media, every sixth with two items; beginnings and media recur."""
    draw = random.Random(0)
    torch.manual_seed(0)
    hidden_size = decoder.config.hidden_size
    scale = float(decoder.model.embed_tokens.weight.detach().std())
    pads = (
        decoder.config.image_token_id,
        decoder.config.audio_token_id,
        decoder.config.video_token_id,
    )
    items = [
        (pads[n % 3], scale * torch.randn(draw.choice((4, 9, 25)), hidden_size), f"item {n}")
        for n in range(9)
    ]
    stems = [[draw.randrange(600) for _ in range(length)] for length in (0, 20, 52)]
    prompts = []
    for number in range(count):
        ids = list(stems[number % 3])
        media = []
        for _ in range(2 if number % 6 == 5 else 0 if number % 5 < 2 else 1):
            pad, rows, key = items[(number + len(media)) // 2 % len(items)]
            media.append((len(ids), rows, key))
            ids += [pad] * len(rows)
        ids += [draw.randrange(600) for _ in range(draw.randrange(3, 60))]
        prompts.append(Prompt(tuple(ids), tuple(media), 0.8 * (number % 2), number))
    return prompts


@pytest.fixture(scope="module")
def prompts(pair: tuple[Decoder, Mtp]) -> list[Prompt]:
    return make_prompts(pair[0], 200)


def test_the_rows_cover_every_pair() -> None:
    values = [{row[column] for row in ROWS} for column in range(5)]
    assert [len(each) for each in values] == [2, 2, 2, 4, 3]
    for one, other in itertools.combinations(range(5), 2):
        found = {(row[one], row[other]) for row in ROWS}
        assert found == set(itertools.product(values[one], values[other]))


def test_the_prompts_show_every_kind_of_media(
    pair: tuple[Decoder, Mtp], prompts: list[Prompt]
) -> None:
    config = pair[0].config
    assert sum(bool(prompt.media) for prompt in prompts) >= 120
    assert sum(len(prompt.media) == 2 for prompt in prompts) >= 20
    for pad in (config.image_token_id, config.audio_token_id, config.video_token_id):
        assert sum(pad in prompt.ids for prompt in prompts) >= 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_tokens_do_not_depend_on_how_they_are_made(
    pair: tuple[Decoder, Mtp],
    plain: Decoder,
    prompts: list[Prompt],
    row: Row,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = generate(pair, prompts, row, 8, monkeypatch)
    assert num_near_ties(plain, prompts, outputs) <= RARE * sum(map(len, outputs))


@pytest.mark.check
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_nor_do_the_tokens_of_long_answers(
    pair: tuple[Decoder, Mtp],
    plain: Decoder,
    prompts: list[Prompt],
    row: Row,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = generate(pair, prompts, row, 50, monkeypatch)
    assert num_near_ties(plain, prompts, outputs) <= RARE * sum(map(len, outputs))


def generate(
    pair: tuple[Decoder, Mtp],
    prompts: Sequence[Prompt],
    row: Row,
    max_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> list[list[int]]:
    """The outputs of a row's engine."""
    monkeypatch.setattr(acceptance, "FLOOR", 0.0)  # drafts, however seldom they hold
    batch, _, prefix, drafts, disturbance = row
    options = {"use_prefix_cache": prefix, "max_draft_tokens": drafts}
    requests = [prompt.request(max_tokens, **options) for prompt in prompts]
    if disturbance == "resumed":
        halves = [prompt.request(max_tokens // 3, **options) for prompt in prompts]
        run(make_core(pair, row), halves, batch)
        for request, half in zip(requests, halves, strict=True):
            request.token_ids = list(half.token_ids)
    core = make_core(pair, row)
    if disturbance == "preempted":
        disturb(core, monkeypatch)
    run(core, requests, batch)
    assert (sum(r.num_preemptions for r in requests) > 0) == (disturbance == "preempted")
    assert (sum(r.num_found_tokens for r in requests) > 0) == prefix
    if drafts:
        assert sum(sum(request.num_drafted) for request in requests) > 0
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def make_core(pair: tuple[Decoder, Mtp], row: Row) -> EngineCore:
    decoder, mtp = pair
    batch, max_step_tokens, _, drafts, _ = row
    config = decoder.config
    return build_core(
        decoder,
        mtp if drafts else None,
        layers=(*config.layers, *(config.mtp_layers if drafts else ())),
        visible=config.swa_visible,
        kv_bytes=64 << 20,
        block_size=BLOCK,
        max_running=batch,
        max_step_tokens=max_step_tokens,
        max_context=1024,
        dtype=torch.float32,
    )


def run(core: EngineCore, requests: Sequence[Request], batch: int) -> None:
    for start in range(0, len(requests), batch):
        for request in requests[start : start + batch]:
            core.add(request)
        while core.scheduler.num_unfinished:
            plan = core.step().plan
            assert plan.scheduled or plan.preempted


def disturb(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the blocks of a running request at every fifth step, as another's need would, of each
    request twice at most."""
    steps = itertools.count(1)

    def plan() -> Plan:
        planning = scheduler._Planning(core.scheduler)
        victims = [each for each in core.scheduler.running if each.num_preemptions < 2]
        if next(steps) % 5 == 0 and victims:
            planning._preempt(victims[-1])
        return planning.plan()

    monkeypatch.setattr(core.scheduler, "plan", plan)


def num_near_ties(
    decoder: Decoder, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]]
) -> int:
    """Tokens that are not the best of their position, but as good. None may be worse."""
    count = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        scores = plain_scores(decoder, prompt, output)  # [P, V]
        best = scores.amax(dim=-1)
        chosen = scores.gather(-1, torch.tensor(output)[:, None])[:, 0]
        gap = (best - chosen) / best.abs()
        assert float(gap.max()) <= NEAR_TIE
        count += int((gap > 0).sum())
    return count


@torch.inference_mode()
def plain_scores(decoder: Decoder, prompt: Prompt, output: Sequence[int]) -> Tensor:
    """What each position of the output maximises, in one pass without a cache. -> [P, V]."""
    ids = torch.tensor([*prompt.ids, *output[:-1]])
    x = decoder.embed(ids)
    for start, rows, _ in prompt.media:
        x = merge_embeddings(x, rows, torch.arange(start, start + len(rows)))
    hidden = decoder(x, torch.arange(len(ids)), FullSequences((len(ids),)))
    logits = decoder.logits(hidden[len(prompt.ids) - 1 :]).double()
    if prompt.temperature == 0:
        return logits
    positions = list(range(len(output)))
    seeds, choices = [prompt.seed] * len(output), [0] * len(output)
    return logits / prompt.temperature + gumbel(seeds, choices, positions, like=logits)
