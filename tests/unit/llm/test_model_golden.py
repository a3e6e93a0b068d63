"""The main model and its MTP blocks against numbers computed by independent implementations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.errors import InvalidRequest
from services.llm.model.attention import FullSequences
from services.llm.model.decoder import Decoder, merge_embeddings
from services.llm.model.mtp import Mtp
from tests.support import golden_decoder
from tests.support.sequence_cache import SequenceCache

GOLDEN = golden_decoder.golden()
VARIANTS = list(GOLDEN["variants"])
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
PROMPT_LEN = 20

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=TOLERANCE, ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def close(expected: Any, dtype: torch.dtype) -> Any:
    return pytest.approx(expected, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])


def norm(x: Tensor) -> float:
    return x.norm().item()


def test_fill_reproduces_the_published_checks() -> None:
    tensors = golden_decoder.weights("base_vis7")
    checks = GOLDEN["fill"]
    assert len(tensors) == checks["n_tensors"]
    assert sum(t.numel() for t in tensors.values()) == checks["n_params"]
    flat = torch.cat([t.flatten() for t in tensors.values()])
    assert flat.sum().item() == pytest.approx(checks["total_sum"], rel=1e-9)
    assert norm(flat) == pytest.approx(checks["total_l2"], rel=1e-9)
    for name, values in checks["checks"].items():
        assert tensors[name].flatten()[:4].tolist() == pytest.approx(values, abs=1e-9)
    wider = torch.cat([t.flatten() for t in golden_decoder.weights("kv24_vis7").values()])
    assert norm(wider) == pytest.approx(checks["kv24_total_l2"], rel=1e-9)


def test_merge_puts_each_modality_in_sequence_order() -> None:
    decoder, _ = golden_decoder.build("base_vis7", torch.float64)
    merged = golden_decoder.embed_prompt(decoder, golden_decoder.prompt_ids())
    expected = GOLDEN["input"]
    assert norm(merged) == pytest.approx(expected["merged_l2"], rel=1e-9)
    assert merged[4, :4].tolist() == pytest.approx(expected["merged_row4_first4"], abs=1e-9)
    assert merged[11, :4].tolist() == pytest.approx(expected["merged_row11_first4"], abs=1e-9)


@pytest.mark.parametrize("num_rows", [2, 4])
def test_merge_refuses_rows_that_do_not_match_the_placeholders(num_rows: int) -> None:
    with pytest.raises(InvalidRequest, match=f"3 placeholders for {num_rows} embedding rows"):
        merge_embeddings(torch.zeros(8, 2), torch.ones(num_rows, 2), torch.tensor([1, 2, 5]))


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_main_model(variant: str, dtype: torch.dtype, attention: str) -> None:
    decoder, _ = golden_decoder.build(variant, dtype, attention)
    layer_outs: list[Tensor] = []
    for layer in decoder.model.layers:
        layer.register_forward_hook(lambda _m, _a, out: layer_outs.append(out))
    hidden, logits = run_main(decoder, variant, golden_decoder.prompt_ids())
    expected = GOLDEN["variants"][variant]

    outs = [[norm(out), out[0, 0].item(), out[19, 0].item()] for out in layer_outs]
    assert outs == [close(out, dtype) for out in expected["layer_out"]]
    assert hidden.norm(dim=-1).tolist() == close(expected["hidden"]["l2"], dtype)
    assert hidden[19, :4].tolist() == close(expected["hidden"]["row19_first4"], dtype)
    assert logits[:, :4].tolist() == [close(row, dtype) for row in expected["logits"]["first4"]]
    assert logits.argmax(dim=-1).tolist() == expected["logits"]["argmax"]
    assert logits.norm(dim=-1).tolist() == close(expected["logits"]["l2"], dtype)
    assert norm(logits) == close(expected["logits"]["total_l2"], dtype)
    assert logits.mean().item() == close(expected["logits"]["sum"] / logits.numel(), dtype)
    if "row19" in expected["logits"]:
        assert logits[19].tolist() == close(expected["logits"]["row19"], dtype)


@pytest.mark.parametrize("variant", ["base_vis7", "base_vis6"])
def test_gate_chooses_and_weighs(variant: str, dtype: torch.dtype) -> None:
    decoder, _ = golden_decoder.build(variant, dtype)
    routed: dict[str, tuple[Tensor, Tensor]] = {}
    for index, layer in enumerate(decoder.model.layers):
        if decoder.config.layers[index].is_moe:
            layer.mlp.gate.register_forward_hook(
                lambda _m, _a, out, index=index: routed.update({str(index): out})
            )
    run_main(decoder, variant, golden_decoder.prompt_ids())
    expected = GOLDEN["variants"][variant]["router"]
    assert routed.keys() == expected.keys()
    for layer, (ids, weights) in routed.items():
        assert ids.tolist() == expected[layer]["idx"]
        assert weights[:, 0].tolist() == close(expected[layer]["w"], dtype)
        assert weights.sum(dim=-1).tolist() == close([1.0] * PROMPT_LEN, dtype)


@pytest.mark.parametrize("chunks", [(7, 6, 7), (1,) * 20])
def test_chunked_prefill_equals_one_pass(chunks: tuple[int, ...]) -> None:
    decoder, _ = golden_decoder.build("base_vis7", torch.float64)
    x = golden_decoder.embed_prompt(decoder, golden_decoder.prompt_ids())
    positions = torch.arange(PROMPT_LEN)
    whole = decoder(x, positions, FullSequences((PROMPT_LEN,)))
    cache, hiddens = SequenceCache(), []
    for rows, where in zip(x.split(chunks), positions.split(chunks), strict=True):
        cache.start = int(where[0])
        hiddens.append(decoder(rows, where, cache))
    torch.testing.assert_close(torch.cat(hiddens), whole, rtol=0, atol=1e-12)


def test_mtp_blocks_under_teacher_forcing(variant: str, dtype: torch.dtype) -> None:
    decoder, mtp = golden_decoder.build(variant, dtype)
    expected = GOLDEN["variants"][variant]["mtp"]
    ids = torch.cat((golden_decoder.prompt_ids(), torch.tensor(expected["next_ids"])))
    hidden, _ = run_main(decoder, variant, ids[:PROMPT_LEN])
    x = embed(decoder, variant, ids)
    positions = torch.arange(PROMPT_LEN)
    for depth, block in enumerate(expected["blocks"]):
        shifted = x[1 + depth :][:PROMPT_LEN]
        out = mtp.layer(depth, shifted, hidden, positions, FullSequences((PROMPT_LEN,)))
        logits = decoder.logits(out)
        assert logits.argmax(dim=-1).tolist() == block["argmax"]
        assert norm(logits) == close(expected["l2"][depth], dtype)
        for row, values in block["first4"].items():
            assert logits[int(row), :4].tolist() == close(values, dtype)


def test_mtp_reads_merged_rows_at_media_positions() -> None:
    """With embeddings of the pad ids instead, rows that see media change to known numbers."""
    decoder, mtp = golden_decoder.build("base_vis7", torch.float64)
    expected = GOLDEN["mtp_pad_embedding"]
    hidden, _ = run_main(decoder, "base_vis7", golden_decoder.prompt_ids())
    bonus = GOLDEN["variants"]["base_vis7"]["prefill"]["bonus"]
    ids = torch.cat((golden_decoder.prompt_ids(), torch.tensor([bonus, *expected["drafts"]])))
    x = decoder.embed(ids)
    for depth in range(3):
        shifted = x[1 + depth :][:PROMPT_LEN]
        attend = FullSequences((PROMPT_LEN,))
        logits = decoder.logits(mtp.layer(depth, shifted, hidden, torch.arange(PROMPT_LEN), attend))
        for row, values in expected["rows"].items():
            assert logits[int(row), :4].tolist() == pytest.approx(values[depth], abs=1e-9)


def test_mtp_stores_keys_rotated_by_the_rows_own_position() -> None:
    """A constant shift of an MTP block's positions cancels out of its logits, not of its keys."""
    decoder, mtp = golden_decoder.build("base_vis7", torch.float64)
    hidden, _ = run_main(decoder, "base_vis7", golden_decoder.prompt_ids())
    cache = SequenceCache()
    x = embed(decoder, "base_vis7", golden_decoder.prompt_ids())
    mtp.layer(0, x[1:], hidden[:-1], torch.arange(PROMPT_LEN - 1), cache)
    block = mtp.layers[0]
    joined = torch.cat((block.enorm(x[1:]), block.hnorm(hidden[:-1])), dim=-1)
    weights = golden_decoder.weights("base_vis7")
    k_proj = weights["model.mtp.layers.0.self_attn.k_proj.weight"]
    plain = block.input_layernorm(block.eh_proj(joined)) @ k_proj.T  # [T, K * H]
    stored, _ = cache.stored[len(decoder.config.layers)]
    row, pair, rotary_dim = 11, 1, 8
    angle = row * 10_000.0 ** (-2 * pair / rotary_dim)
    first, second = plain[row, pair], plain[row, pair + rotary_dim // 2]
    cos, sin = torch.cos(torch.tensor(angle)).double(), torch.sin(torch.tensor(angle)).double()
    assert stored[row, 0, pair].item() == pytest.approx((first * cos - second * sin).item(), 1e-5)


def test_prefill_drafts(variant: str, dtype: torch.dtype) -> None:
    decoder, mtp = golden_decoder.build(variant, dtype)
    expected = GOLDEN["variants"][variant]["prefill"]
    hidden, logits = run_main(decoder, variant, golden_decoder.prompt_ids())
    bonus = int(logits[-1].argmax())
    assert bonus == expected["bonus"]
    speculation = Speculation(decoder, mtp, variant)
    drafts, rows = speculation.draft([*golden_decoder.prompt_ids().tolist(), bonus], hidden, 0)
    assert drafts == expected["drafts"]
    assert rows[:, :4].tolist() == [close(row, dtype) for row in expected["first4"]]
    assert rows.norm(dim=-1).tolist() == close(expected["l2"], dtype)


def test_greedy_decoding(variant: str, dtype: torch.dtype) -> None:
    decoder, _ = golden_decoder.build(variant, dtype)
    ids = golden_decoder.prompt_ids()
    expected = GOLDEN["variants"][variant]["greedy"]
    for _ in expected:
        _, logits = run_main(decoder, variant, ids)
        ids = torch.cat((ids, logits[-1:].argmax(dim=-1)))
    assert ids[PROMPT_LEN:].tolist() == expected


@pytest.mark.parametrize("mode", ["speculative", "speculative_exact"])
def test_speculative_trace(variant: str, mode: str) -> None:
    """Drafts, verdicts and text of every step; exact mode repairs rows built on rejected drafts."""
    decoder, mtp = golden_decoder.build(variant, torch.float32)
    expected = GOLDEN["variants"][variant][mode]
    speculation = Speculation(decoder, mtp, variant)
    assert speculation.run(num_new=12, exact=mode == "speculative_exact") == expected


def embed(decoder: Decoder, variant: str, ids: Tensor) -> Tensor:
    return golden_decoder.embed_prompt(decoder, ids, merge="nomerge" not in variant)


def run_main(decoder: Decoder, variant: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids: [T] -> hidden [T, D], logits [T, V], without a cache."""
    x = embed(decoder, variant, ids)
    hidden = decoder(x, torch.arange(len(ids)), FullSequences((len(ids),)))
    return hidden, decoder.logits(hidden)


class Speculation:
    """Greedy speculative decoding of one request, written for the eye."""

    def __init__(self, decoder: Decoder, mtp: Mtp, variant: str) -> None:
        self.decoder, self.mtp, self.variant = decoder, mtp, variant
        self.num_drafts = len(mtp.layers)
        self.target_cache, self.draft_cache = SequenceCache(), SequenceCache()

    def run(self, num_new: int, exact: bool) -> list[list[Any]]:
        """Every step as [length, bonus, drafts, target choices, accepted, emitted]."""
        ids = golden_decoder.prompt_ids().tolist()
        hidden = self.target(ids, 0)
        ids.append(int(self.decoder.logits(hidden[-1:]).argmax()))
        drafts, _ = self.draft(ids, hidden, 0)
        steps = []
        while len(ids) - PROMPT_LEN < num_new:
            length, bonus = len(ids) - 1, ids[-1]
            verified = self.target([*ids, *drafts], length)
            choices = self.decoder.logits(verified).argmax(dim=-1).tolist()
            accepted = 0
            while accepted < self.num_drafts and drafts[accepted] == choices[accepted]:
                accepted += 1
            emitted = choices[: accepted + 1]
            steps.append([length, bonus, drafts, choices, accepted, emitted])
            ids += emitted
            hidden = torch.cat((hidden, verified[: accepted + 1]))
            first = length - (self.num_drafts - 1) if exact else length
            drafts, _ = self.draft(ids, hidden, first)
        return steps

    def target(self, ids: list[int], start: int) -> Tensor:
        """Hidden states of the rows from ``start`` on."""
        self.target_cache.start = start
        x = embed(self.decoder, self.variant, torch.tensor(ids))[start:]
        return self.decoder(x, torch.arange(start, len(ids)), self.target_cache)

    def draft(self, ids: list[int], hidden: Tensor, start: int) -> tuple[list[int], Tensor]:
        """Run rows ``start``.. of each block; all ids but the last have a hidden state.

        -> drafts, logits [N, V] of the rows they come from.
        """
        drafts: list[int] = []
        rows: list[Tensor] = []
        positions = torch.arange(start, len(hidden))
        self.draft_cache.start = start
        for depth in range(self.num_drafts):
            x = embed(self.decoder, self.variant, torch.tensor([*ids, *drafts]))
            shifted = x[start + 1 + depth :]
            out = self.mtp.layer(depth, shifted, hidden[start:], positions, self.draft_cache)
            rows.append(self.decoder.logits(out[-1]))
            drafts.append(int(rows[-1].argmax()))
        return drafts, torch.stack(rows)
