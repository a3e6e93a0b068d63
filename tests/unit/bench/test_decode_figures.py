"""The arithmetic of the engine comparison, by hand."""

from typing import Any

import pytest
import torch

from tests.bench.engines.checkpoints import pad_values
from tests.bench.engines.figures import PREFILL, RATE, Round, Shape, rates, verdicts

SHAPE = Shape(batch=4, input_tokens=100, output_tokens=11)


def test_rates_are_best_and_median_of_the_rounds() -> None:
    rounds = [Round(1.0, 3.0), Round(0.5, 2.5), Round(2.0, 12.0)]
    found = rates(rounds, SHAPE)
    assert found[RATE] == pytest.approx({"best": 44 / 2.5, "median": 44 / 3})
    # Forty tokens follow the first four: in 2, 2 and 10 seconds.
    assert found["decode_tokens_per_s"] == pytest.approx({"best": 20, "median": 20})
    assert found[PREFILL] == pytest.approx({"best": 800, "median": 400})


def test_the_median_of_two_rounds_lies_between_them() -> None:
    found = rates([Round(1.0, 2.0), Round(1.0, 4.0)], SHAPE)
    assert found[RATE] == pytest.approx({"best": 22, "median": (22 + 11) / 2})


def test_noise_never_makes_decoding_fast() -> None:
    rate = "decode_tokens_per_s"
    assert rates([Round(2.0, 1.0)], SHAPE)[rate] == {"best": 0, "median": 0}
    assert rates([Round(2.0, 1.0), Round(1.0, 3.0)], SHAPE)[rate] == {"best": 20, "median": 20}


def row(best: float, prefill: float = 1.0) -> dict[str, Any]:
    return {
        RATE: {"best": best, "median": best / 2},
        PREFILL: {"best": prefill, "median": prefill},
    }


def test_gates_hold_the_best_against_the_best_rival() -> None:
    found = verdicts(
        "bench",
        {
            "mimo": {1: row(150), 8: row(119)},
            "transformers": {1: row(100), 8: row(80)},
            "llama": {8: row(100)},
        },
    )
    by_name = {(v["what"], v["batch"]): v for v in found}
    assert by_name.keys() == {("transformers", 1), ("transformers", 8), ("the best peer", 8)}
    first = by_name["transformers", 1]
    assert first["kind"] == "gate" and first["reached"] and first["ratio_of_bests"] == 1.5
    assert not by_name["transformers", 8]["reached"]  # 119 / 80 is below 1.5
    best = by_name["the best peer", 8]
    assert (best["rival"], best["kind"], best["reached"]) == ("llama", "goal", False)
    assert best["ratio_of_bests"] == best["ratio_of_medians"] == pytest.approx(1.19)


def test_prefill_has_a_goal_of_its_own() -> None:
    found = verdicts("bench", {"mimo": {32: row(1, prefill=90)}, "vllm": {32: row(9, prefill=60)}})
    prefill = next(v for v in found if v["what"] == "vLLM, prefill")
    assert prefill["reached"] and prefill["ratio_of_bests"] == pytest.approx(1.5)


def test_drafts_are_judged_on_the_bundled_model_alone() -> None:
    engines = {"mimo-mtp": {1: row(50)}, "mimo": {1: row(50)}, "llama": {1: row(40)}}
    assert [v["what"] for v in verdicts("bundled", engines)] == ["llama.cpp"]
    assert verdicts("bench", engines) == []  # no rival of a gate ran


def test_padded_values_change_no_result() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.v_proj.weight": torch.randn(2 * 3, 8, generator=generator),  # two heads of 3
        "a.o_proj.weight": torch.randn(8, 2 * 3, generator=generator),
        "b.q_proj.weight": torch.randn(10, 8, generator=generator),
    }
    padded, config = pad_values(tensors, {"v_head_dim": 3, "head_dim": 5})
    assert padded["a.v_proj.weight"].shape == (10, 8)
    assert padded["a.o_proj.weight"].shape == (8, 10)
    assert padded["b.q_proj.weight"] is tensors["b.q_proj.weight"]
    assert (config["v_head_dim"], config["swa_v_head_dim"]) == (5, 5)
    x = torch.randn(8, generator=generator)
    before = tensors["a.o_proj.weight"] @ (tensors["a.v_proj.weight"] @ x)
    after = padded["a.o_proj.weight"] @ (padded["a.v_proj.weight"] @ x)
    torch.testing.assert_close(after, before)
