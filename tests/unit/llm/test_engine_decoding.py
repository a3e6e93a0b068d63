"""The engine around a real decoder: paged, chunked, batched, speculative equals the plain way."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.llm.engine import acceptance
from services.llm.engine.batch import Segment
from services.llm.engine.block_manager import BlockManager
from services.llm.engine.core import EngineCore
from services.llm.engine.kv_cache import MAX_LAG
from services.llm.engine.request import Request, Span
from services.llm.model.attention import FullSequences
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from tests.support import golden_decoder
from tests.support.toy_decoder import build_core, make_request, run_all

PROMPTS = [[3, 10, 17, 24], [(7 * p + 5) % 58 for p in range(50)], [41], [9, 9, 9] * 7]

# All four prompts fit at once, their continuations do not.
FEW_BLOCKS = {"full": 26, "window": 24}

# Where the golden prompt takes its encoder rows from: images are item 0, audio is item 1.
SPANS = (Span(1, 4, 1, 0), Span(0, 5, 2, 0), Span(1, 11, 1, 1), Span(0, 12, 1, 2))


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Decoder, Mtp]]:
    variants = ("chain_vis6", "chain_vis7", "base_vis7")
    return {name: golden_decoder.build(name, torch.float64) for name in variants}


def core_around(
    models: tuple[Decoder, Mtp], *, speculate: bool = True, **limits: int
) -> EngineCore:
    decoder, mtp = models
    config = decoder.config
    return build_core(
        decoder,
        mtp if speculate else None,
        layers=(*config.layers, *(config.mtp_layers if speculate else ())),
        visible=config.swa_visible,
        **{"kv_bytes": 4 << 20, "max_step_tokens": 512, **limits},
    )


def golden_request(**options: object) -> Request:
    images, audio = golden_decoder.media_rows().split((3, 2))
    items = {"spans": SPANS, "item_rows": {0: images, 1: audio}}
    return make_request(golden_decoder.prompt_ids().tolist(), **{**items, **options})


def recompute(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding that runs the whole sequence for every token."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            hidden = hidden_of(decoder, ids)
            ids.append(int(decoder.logits(hidden[-1:]).argmax()))
    return ids[len(prompt) :]


def hidden_of(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    x = decoder.embed(torch.tensor(ids))
    return decoder(x, torch.arange(len(ids)), FullSequences((len(ids),)))  # [T, D]


def test_chunks_through_the_cache_give_the_hidden_states_of_one_pass(
    models: dict[str, tuple[Decoder, Mtp]],
) -> None:
    decoder, _ = models["base_vis7"]
    core = core_around(models["base_vis7"], speculate=False)
    blocks: BlockManager = core.scheduler.blocks
    sequences = {name: [(k * p + 1) % 58 for p in range(43)] for name, k in (("a", 7), ("b", 11))}
    requests = {name: make_request(ids) for name, ids in sequences.items()}
    rows: dict[str, list[Tensor]] = {name: [] for name in sequences}
    # (request, tokens) by step: ragged, across block borders and windows, one at a time and many.
    steps = [{"a": 5}, {"a": 3, "b": 16}, {"a": 1, "b": 1}, {"a": 20, "b": 1}, {"a": 14, "b": 25}]
    for step in steps:
        segments = []
        for name, count in step.items():
            request = requests[name]
            blocks.drop_behind(request)
            assert blocks.reserve(request, request.num_cached_tokens + count)
            segments.append(Segment(request, request.num_cached_tokens, count))
        ids = [i for s in segments for i in s.request.token_ids[s.start : s.stop]]
        hidden = core._runner.forward(core._runner.build(segments), ids)
        for name, part in zip(step, hidden.split(list(step.values())), strict=True):
            rows[name].append(part)
            requests[name].num_cached_tokens += step[name]
    assert blocks.num_used("window") < blocks.num_used("full")
    for name, ids in sequences.items():
        torch.testing.assert_close(
            torch.cat(rows[name]), hidden_of(decoder, ids), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("max_step_tokens", [16, 512])
def test_a_batch_equals_recomputing_each_alone(
    models: dict[str, tuple[Decoder, Mtp]], speculate: bool, max_step_tokens: int
) -> None:
    pair = models["chain_vis6"]
    core = core_around(pair, speculate=speculate, max_step_tokens=max_step_tokens, max_running=4)
    requests = [make_request(p, max_tokens=24, max_draft_tokens=3) for p in PROMPTS]
    assert run_all(core, requests) == [recompute(pair[0], p, 24) for p in PROMPTS]


def test_sampled_tokens_do_not_depend_on_batch_drafts_chunks_or_preemption(
    models: dict[str, tuple[Decoder, Mtp]],
) -> None:
    pair = models["chain_vis7"]
    options = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4, "max_tokens": 20}

    def requests(max_draft_tokens: int) -> list[Request]:
        return [
            make_request(p, seed=n, max_draft_tokens=max_draft_tokens, **options)
            for n, p in enumerate(PROMPTS)
        ]

    alone = [run_all(core_around(pair, speculate=False), [r])[0] for r in requests(0)]
    assert run_all(core_around(pair), requests(3)) == alone
    tight = core_around(pair, max_step_tokens=16, max_running=4, num_blocks=FEW_BLOCKS)
    squeezed = requests(3)
    assert run_all(tight, squeezed) == alone
    assert sum(request.num_preemptions for request in squeezed) > 0
    assert sum(sum(request.num_accepted) for request in squeezed) > 0


def test_a_resumed_request_with_drafts_equals_the_undisturbed_one(
    models: dict[str, tuple[Decoder, Mtp]],
) -> None:
    options = {"max_tokens": 20, "temperature": 1.0, "seed": 5, "max_draft_tokens": 3}
    (whole,) = run_all(core_around(models["chain_vis7"]), [golden_request(**options)])
    for count in (1, 9):
        request = golden_request(**options)
        request.token_ids += whole[:count]
        assert run_all(core_around(models["chain_vis7"]), [request]) == [whole[count:]]


@pytest.mark.parametrize("variant", ["chain_vis6", "chain_vis7", "base_vis7"])
@pytest.mark.parametrize("max_step_tokens", [512, 7, 4])
def test_golden_drafts_step_by_step(
    models: dict[str, tuple[Decoder, Mtp]],
    variant: str,
    max_step_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptance, "FLOOR", 0.0)  # drafts go on however badly they hold
    golden = golden_decoder.golden()["variants"][variant]
    core = core_around(models[variant], max_step_tokens=max_step_tokens, max_running=2)
    request = golden_request(max_tokens=40, max_draft_tokens=3)
    core.add(request)
    while not request.is_decoding:
        core.step()
    trace = []
    for _ in golden["speculative_exact"]:
        length, bonus, drafts = request.num_cached_tokens, request.token_ids[-1], request.draft_ids
        (progress,) = core.step().progress
        emitted = [sampled.token_id for sampled in progress.tokens]
        trace.append([length, bonus, drafts, len(emitted) - 1, emitted])
    expected = [
        [step[0], step[1], step[2], step[4], step[5]] for step in golden["speculative_exact"]
    ]
    assert trace == expected
    assert request.token_ids[20:32] == golden["greedy"]


@pytest.mark.parametrize("chunks", [[18, 1, 1], [7, 6, 6, 1], [1] * 20, [4, 1, 15]])
def test_rows_that_look_past_a_chunk_wait_for_it(
    models: dict[str, tuple[Decoder, Mtp]], chunks: list[int]
) -> None:
    core = core_around(models["base_vis7"])
    request = golden_request(max_tokens=9, max_draft_tokens=3)
    core.add(request)
    for chunk in chunks:
        core.scheduler.max_step_tokens = chunk
        core.step()
    assert request.token_ids[20:] == [48]
    assert request.draft_ids == [47, 16, 40]


def test_drafts_after_an_item_arrived_late_are_those_of_one_prefill(
    models: dict[str, tuple[Decoder, Mtp]],
) -> None:
    core = core_around(models["base_vis7"])
    images, audio = golden_decoder.media_rows().split((3, 2))
    request = golden_request(
        max_tokens=9, max_draft_tokens=3, item_rows={1: audio}, pending_items={0}
    )
    core.add(request)
    core.step()
    assert request.num_cached_tokens == 5
    request.item_rows[0] = images
    request.pending_items.clear()
    core.step()
    assert request.draft_ids == [47, 16, 40]


@pytest.mark.parametrize(("floor", "num_steps"), [(0.0, 6), (2.0, 17), (2.0, 37)])
def test_mtp_keys_after_speculation_equal_those_of_a_prefill(
    models: dict[str, tuple[Decoder, Mtp]],
    floor: float,
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when drafting rests and rows wait for the next try. Also sees a constant shift of rotary
    positions, which no logit shows."""
    monkeypatch.setattr(acceptance, "FLOOR", floor)
    pair = models["chain_vis6"]
    speculated, prefilled = core_around(pair), core_around(pair)
    request = golden_request(max_tokens=70, max_draft_tokens=3)
    speculated.add(request)
    for _ in range(num_steps):
        speculated.step()
    again = replace(request, num_cached_tokens=0, draft_ids=[], block_tables={})
    again.num_prompt_tokens = again.num_tokens - 1
    prefilled.add(again)
    prefilled.step()
    stop = request.num_settled_tokens
    assert request.num_cached_tokens - stop <= (MAX_LAG if floor else 2)
    for layer in (5, 6, 7):  # as far back as the next query sees
        for position in range(stop - 5, stop):
            keys = [
                core._runner.cache.layer(layer)[0][r.block_tables["window"][position // 4]][
                    position % 4
                ]
                for core, r in ((speculated, request), (prefilled, again))
            ]
            torch.testing.assert_close(keys[0], keys[1], rtol=0, atol=1e-12)
