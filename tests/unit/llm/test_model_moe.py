"""Gate and experts: who is chosen, by what, with which weight, and that both paths agree."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mimo.nn.linear import Packing
from services.llm.model.config import DecoderConfig
from services.llm.model.moe import GATHER_MAX_PAIRS, Experts, Gate, SparseMoe
from tests.support.kernels import each_packing

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 8, 12, 20, 3


def config(**fields: Any) -> DecoderConfig:
    return DecoderConfig.from_checkpoint(
        {
            "vocab_size": 32,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "moe_layer_freq": [1],
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": TOPK,
            **fields,
        }
    )


def gate(dtype: torch.dtype = torch.float64, **fields: Any) -> Gate:
    module = Gate(config(**fields), dtype=dtype)
    torch.manual_seed(0)
    module.weight.data = torch.randn(EXPERTS, HIDDEN, dtype=dtype)
    return module


def bias(module: Gate) -> Tensor:
    assert module.e_score_correction_bias is not None
    return module.e_score_correction_bias


def plain_moe(module: SparseMoe, x: Tensor) -> Tensor:
    """The formula, one token and one expert at a time."""
    out = torch.zeros_like(x)
    ids, weights = module.gate(x)
    for t in range(len(x)):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            gate_rows, up_rows = module.experts.gate_up_proj[expert].chunk(2)
            inner = F.silu(gate_rows @ x[t]) * (up_rows @ x[t])
            out[t] += weight * (module.experts.down_proj[expert] @ inner)
    return out


def moe(device: str = "cpu") -> SparseMoe:
    """A device that is not the CPU selects the accelerator's path; it runs here as well."""
    torch.manual_seed(1)
    return SparseMoe(config(initializer_range=1.0), dtype=torch.float64, device=device)


@pytest.mark.parametrize("num_tokens", [1, 2, GATHER_MAX_PAIRS // TOPK, 40])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_agree_with_the_formula(num_tokens: int, device: str) -> None:
    module = moe(device)
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(module(x), plain_moe(module, x), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_pass_the_formulas_gradient(num_tokens: int, device: str) -> None:
    module = moe(device)
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    inputs = (x, *module.parameters())
    fast = torch.autograd.grad(module(x).square().sum(), inputs)
    plain = torch.autograd.grad(plain_moe(module, x).square().sum(), inputs)
    for got, expected in zip(fast, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_all_paths_give_bfloat16_out_of_float32_weights() -> None:
    torch.manual_seed(3)
    experts = Experts(
        EXPERTS, HIDDEN, INTERMEDIATE, std=1.0, gather_max_pairs=0, dtype=torch.bfloat16
    )
    x = torch.randn(40, HIDDEN, dtype=torch.bfloat16)
    ids = torch.randint(EXPERTS, (40, TOPK))
    weights = torch.rand(40, TOPK)
    outs = [experts(x, ids, weights)]
    for gather_max_pairs in (0, TOPK):
        experts.gather_max_pairs = gather_max_pairs
        rows = zip(x.split(1), ids.split(1), weights.split(1), strict=True)
        outs.append(torch.cat([experts(*row) for row in rows]))
    halves = zip(x.split(20), ids.split(20), weights.split(20), strict=True)
    outs.append(torch.cat([experts(*half) for half in halves]))
    for out in outs:
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, outs[0], rtol=2e-2, atol=2e-2)


@each_packing
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize(("hidden", "intermediate"), [(HIDDEN, INTERMEDIATE), (96, 34), (130, 64)])
def test_packed_experts_agree_with_the_formula(
    packing: Packing, dtype: torch.dtype, num_tokens: int, hidden: int, intermediate: int
) -> None:
    torch.manual_seed(3)
    experts = Experts(
        EXPERTS, hidden, intermediate, std=hidden**-0.5, gather_max_pairs=0, dtype=dtype
    )
    exact = Experts(EXPERTS, hidden, intermediate, std=1.0, gather_max_pairs=0, dtype=torch.float64)
    exact.load_state_dict({name: x.double() for name, x in experts.state_dict().items()})
    x = torch.randn(num_tokens, 2 * hidden).to(dtype)[:, :hidden]
    ids = torch.randint(EXPERTS, (num_tokens, TOPK))
    weights = torch.rand(num_tokens, TOPK)
    with torch.inference_mode():
        expected = exact(x.double(), ids, weights.double())
        experts.pack(packing)
        assert not list(experts.parameters())  # nothing is held twice
        out = experts(x, ids, weights)
        assert out.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        for row in range(min(num_tokens, 5)):
            alone = experts(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
            torch.testing.assert_close(alone, out[row : row + 1], rtol=0, atol=0)


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    module = gate()
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    bias(module)[6] = 10.0
    ids, weights = module(x)
    assert ids[:, 0].tolist() == [6] * 5
    scores = torch.sigmoid(x @ module.weight.T).gather(1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(dim=1, keepdim=True))


def test_without_renormalisation_the_scores_are_the_weights() -> None:
    module = gate(norm_topk_prob=False, routed_scaling_factor=2.5)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    ids, weights = module(x)
    torch.testing.assert_close(weights, 2.5 * torch.sigmoid(x @ module.weight.T).gather(1, ids))


def test_the_lowest_index_wins_a_tie() -> None:
    module = gate()
    module.weight.data[:] = 0.0  # every score is 0.5
    bias(module)[5] = 0.25
    ids, _ = module(torch.randn(4, HIDDEN, dtype=torch.float64))
    assert ids.tolist() == [[5, 0, 1]] * 4


def test_only_the_best_groups_may_be_chosen() -> None:
    """Expert 0 is the best of all, but a group is judged by its best two."""
    module = gate(n_group=4, topk_group=2)
    module.weight.data[:] = 0.0
    bias(module)[:] = torch.tensor([0.9, -0.9, 0.3, 0.3, 0.1, 0.1, 0.5, 0.4])
    ids, _ = module(torch.randn(2, HIDDEN, dtype=torch.float64))
    assert ids.tolist() == [[6, 7, 2]] * 2


def test_a_tie_of_groups_goes_to_the_lower_one() -> None:
    module = gate(n_group=4, topk_group=2)
    module.weight.data[:] = 0.0
    ids, _ = module(torch.randn(2, HIDDEN, dtype=torch.float64))
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_a_float32_gate_scores_bfloat16_rows_in_float32() -> None:
    module = gate(torch.float32)
    x = torch.randn(6, HIDDEN).bfloat16()
    ids, weights = module(x)
    scores = torch.sigmoid(x.float() @ module.weight.T).gather(1, ids)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, scores / scores.sum(dim=1, keepdim=True))


def test_a_bfloat16_gate_rounds_operands_and_nothing_else() -> None:
    module = gate(torch.float32, moe_router_dtype="bfloat16", norm_topk_prob=False)
    x = torch.randn(6, HIDDEN)
    ids, weights = module(x)
    logits = x.bfloat16().double() @ module.weight.bfloat16().double().T
    torch.testing.assert_close(weights, torch.sigmoid(logits).gather(1, ids).float())


def test_without_a_correction_bias_there_is_no_such_tensor() -> None:
    module = gate(topk_method="greedy")
    assert list(module.state_dict()) == ["weight"]
