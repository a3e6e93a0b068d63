"""The prefix cache: what names a block's content, and that taking one over changes no token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.llm.engine.block_pool import BlockPool
from services.llm.engine.core import EngineCore
from services.llm.engine.prefix import PrefixHasher
from services.llm.engine.request import Request, Span
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from tests.support import golden_decoder
from tests.support.toy_decoder import (
    ToyDecoder,
    ToyMtp,
    build_core,
    continuation,
    make_request,
    run_all,
)

SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
ITEMS = {"spans": (Span(0, 1, 2, 3), Span(1, 6, 3, 0)), "item_keys": ("key-a", "key-b")}


def cached_request(prompt: Sequence[int], **options: Any) -> Request:
    return make_request(prompt, use_prefix_cache=True, **options)


def hashes(request: Request, block_size: int = 4, identity: bytes = b"engine") -> list[bytes]:
    return PrefixHasher(block_size, identity).extend(replace(request, block_hashes=[]))


# ── names ──


def test_only_full_blocks_have_a_name_and_equal_beginnings_equal_ones() -> None:
    first, second = (hashes(cached_request(SHARED[:n])) for n in (11, 18))
    assert (len(first), len(second)) == (2, 4)
    assert second[:2] == first


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.token_ids.__setitem__(0, 90),
        lambda r: setattr(r, "cache_salt", b"another tenant"),
        lambda r: setattr(r, "max_draft_tokens", 3),
        lambda r: setattr(r, "item_keys", ("key-c", "key-b")),
        lambda r: setattr(r, "spans", (Span(0, 1, 2, 4), ITEMS["spans"][1])),
        lambda r: setattr(r, "spans", (Span(0, 0, 2, 3), ITEMS["spans"][1])),
        lambda r: setattr(r, "spans", (Span(0, 1, 1, 3), ITEMS["spans"][1])),
        lambda r: setattr(r, "spans", (Span(1, 1, 2, 3), ITEMS["spans"][1])),
        lambda r: setattr(r, "spans", ITEMS["spans"][1:]),
    ],
    ids=["token", "salt", "drafting", "key", "row", "place", "length", "item", "no media"],
)
def test_each_thing_that_decides_a_block_changes_its_name_and_all_later(
    change: Callable[[Request], None],
) -> None:
    request = cached_request(SHARED, **ITEMS)
    changed = replace(request, token_ids=list(request.token_ids))
    change(changed)
    assert not set(hashes(request)) & set(hashes(changed))


def test_what_comes_later_does_not_change_a_name() -> None:
    request = cached_request(SHARED, **ITEMS)
    other = replace(request, token_ids=[*SHARED[:9], 50, *SHARED[10:]])
    assert hashes(request)[:2] == hashes(other)[:2]
    assert not set(hashes(request)[2:]) & set(hashes(other))
    assert not set(hashes(request)) & set(hashes(request, identity=b"another engine"))


def test_rows_count_from_the_block_they_are_in() -> None:
    """A span that crosses a border names in each block the rows that lie there."""
    whole = cached_request(SHARED, spans=(Span(0, 2, 4, 0),), item_keys=("key",))
    parts = (Span(0, 2, 2, 0), Span(0, 4, 2, 2))
    assert hashes(whole) == hashes(replace(whole, spans=parts))


# ── blocks ──


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("take share give publish".split()), st.integers(0, 9))))
def test_a_pool_neither_loses_nor_doubles_a_block(events: list[tuple[str, int]]) -> None:
    pool, held, named = BlockPool(5), list[int](), dict[int, bytes]()
    for event, number in events:
        if event == "take" and pool.num_free:
            block = pool.take()
            assert block not in held
            named.pop(block, None)
            held.append(block)
        elif event == "share":
            block = pool.find(bytes([number]))
            assert (block is None) == (bytes([number]) not in named.values())
            if block is not None:
                assert named[block] == bytes([number])
                pool.share(block)
                held.append(block)
        elif event == "give" and held:
            pool.give_back(held.pop(number % len(held)))
        elif event == "publish" and held:
            block = held[number % len(held)]
            if block not in named and bytes([number]) not in named.values():
                named[block] = bytes([number])
            pool.publish(block, bytes([number]))
        assert pool.num_used == len(set(held))
        assert pool.num_free + pool.num_used == 5
        assert pool.num_cached == len(set(named) - set(held))


# ── tokens ──


@pytest.mark.parametrize("num_right", [None, 0, 3])
def test_a_later_request_computes_only_what_differs(num_right: int | None) -> None:
    mtp = None if num_right is None else ToyMtp(num_right)
    core = build_core(ToyDecoder(history=1 if mtp is None else 0), mtp)
    longer, branching = [*SHARED, 7, 7, 7, 7, 7], [*SHARED[:13], 60, 61, 62, 63, 64, 65]
    for prompt, common in ((SHARED, 0), (longer, 16), (branching, 12), (SHARED, 16)):
        request = cached_request(prompt, max_tokens=9, max_draft_tokens=3)
        expected = continuation(prompt, 9, history=1 if mtp is None else 0)
        assert run_all(core, [request]) == [expected]
        lookahead = 0 if mtp is None else 3
        most = (len(prompt) - lookahead - 1) // 4 * 4
        assert request.num_found_tokens == min(common, most)


def test_a_conversation_goes_on_where_its_last_answer_ended() -> None:
    core = build_core(ToyDecoder())
    first = cached_request(SHARED, max_tokens=30)
    run_all(core, [first])
    prompt = [*first.token_ids, 5, 6, 7]
    second = cached_request(prompt, max_tokens=9)
    assert run_all(core, [second]) == [continuation(prompt, 9, history=1)]
    assert second.num_found_tokens == (len(first.token_ids) - 1) // 4 * 4


def test_choices_that_start_together_share_their_prompt() -> None:
    core = build_core(ToyDecoder(), num_blocks={"full": 24, "window": 30}, max_step_tokens=64)
    choices = [
        cached_request(SHARED, max_tokens=5, temperature=1.0, choice=choice) for choice in range(4)
    ]
    for request in choices:
        core.add(request)
    core.step()
    core.step()
    tables = [request.block_tables["full"] for request in choices]
    assert all(table[:4] == tables[0][:4] for table in tables)
    assert [request.num_found_tokens for request in choices] == [0, 16, 16, 16]


@pytest.mark.parametrize(
    "other", [{"cache_salt": b"b"}, {"use_prefix_cache": False}, {"item_keys": ("y",)}]
)
def test_nothing_is_shared_across_tenants_items_or_against_a_callers_will(
    other: dict[str, Any],
) -> None:
    core = build_core(ToyDecoder())
    media = {"spans": (Span(0, 2, 2, 0),), "item_keys": ("x",)}
    rows = {0: torch.tensor([[11.0], [12.0]])}
    request = cached_request(SHARED, **media, item_rows=rows, cache_salt=b"a")
    changed = replace(request, token_ids=list(SHARED), block_hashes=[], **other)
    same = replace(request, token_ids=list(SHARED), block_hashes=[])
    run_all(core, [request])
    run_all(core, [changed])
    assert changed.num_found_tokens == 0
    run_all(core, [same])
    assert same.num_found_tokens == 16


def test_rows_that_are_cached_need_not_have_arrived() -> None:
    core = build_core(ToyDecoder())
    media = {"spans": (Span(0, 2, 2, 0), Span(1, 17, 1, 0)), "item_keys": ("x", "y")}
    rows = {0: torch.tensor([[11.0], [12.0]]), 1: torch.tensor([[13.0]])}
    first = cached_request(SHARED, **media, item_rows=rows)
    expected = run_all(core, [first])
    late = cached_request(SHARED, **media, pending_items={0, 1})
    core.add(late)
    assert not core.step().progress
    assert late.num_cached_tokens == 17  # up to the row that is not cached
    late.item_rows[1] = rows[1]
    late.pending_items.remove(1)
    while core.scheduler.num_unfinished:
        assert core.step().plan.scheduled
    assert [late.token_ids[len(SHARED) :]] == expected


def test_blocks_with_nan_are_never_found_again() -> None:
    decoder = ToyDecoder()
    core = build_core(decoder, num_blocks={"full": 12, "window": 12})
    decoder.poisoned = {96}
    bad = cached_request([*SHARED, 96], max_tokens=4)
    core.add(bad)
    while core.scheduler.num_unfinished:
        core.step()
    decoder.poisoned = set()
    again = cached_request([*SHARED, 96], max_tokens=4)
    assert run_all(core, [again]) == [continuation([*SHARED, 96], 4, history=1)]
    assert again.num_found_tokens == 0


def test_a_request_that_lost_its_drafts_leaves_nothing_to_others() -> None:
    mtp = ToyMtp(num_right=3)
    core = build_core(ToyDecoder(history=0), mtp)
    request = cached_request([5, 6], max_tokens=40, max_draft_tokens=3)
    core.add(request)
    mtp.fails = True
    while core.scheduler.num_unfinished:
        core.step()
    assert core.scheduler.blocks.num_cached("window") == 0


# ── a real decoder ──


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, Mtp]:
    return golden_decoder.build("chain_vis7", torch.float64)


def core_around(pair: tuple[Decoder, Mtp], **limits: Any) -> EngineCore:
    decoder, mtp = pair
    config = decoder.config
    return build_core(
        decoder,
        mtp,
        layers=(*config.layers, *config.mtp_layers),
        visible=config.swa_visible,
        **{"kv_bytes": 4 << 20, "max_step_tokens": 64, **limits},
    )


@pytest.mark.parametrize("num_blocks", [None, {"full": 26, "window": 30}])
def test_tokens_are_the_same_with_and_without_the_cache(
    pair: tuple[Decoder, Mtp], num_blocks: dict[str, int] | None
) -> None:
    """Conversations that branch, in a pool where they push each other out."""
    stem = [(7 * p + 5) % 58 for p in range(30)]
    prompts = [stem[:n] + [n, 2 * n, 3] for n in (29, 13, 30, 22, 29)] * 2
    images, audio = golden_decoder.media_rows().split((3, 2))
    media = {
        "spans": (Span(1, 4, 1, 0), Span(0, 5, 2, 0), Span(1, 11, 1, 1), Span(0, 12, 1, 2)),
        "item_rows": {0: images, 1: audio},
        "item_keys": ("images", "audio"),
    }
    produced, found = [], 0
    for use_prefix_cache in (False, True):
        core = core_around(pair, num_blocks=num_blocks, max_running=3)
        requests = []
        for number, prompt in enumerate([*prompts, golden_decoder.prompt_ids().tolist()] * 2):
            options = media if number % 11 == 10 else {}
            requests.append(
                make_request(
                    prompt,
                    max_tokens=10,
                    seed=number,
                    temperature=0.8 * (number % 2),
                    max_draft_tokens=3,
                    use_prefix_cache=use_prefix_cache,
                    **options,
                )
            )
        produced.append(run_all(core, requests))
        found += sum(request.num_found_tokens for request in requests)
        for group in core.scheduler.blocks.groups:
            assert core.scheduler.blocks.num_used(group.name) == 0
    assert produced[0] == produced[1]
    assert found > 100
