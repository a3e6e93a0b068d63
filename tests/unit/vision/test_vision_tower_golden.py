"""The tower against numbers computed by two independent implementations in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.nn.attention import AttentionSelector
from services.vision.config import VisionTowerConfig
from services.vision.model import VisionTower
from services.vision.window import PatchLayout, reorder
from tests.support import golden_vision

# sinks, merger norm -> out[0, 0:4], out[21, 22:24], sum, L2
OUTPUTS = {
    ("key0", "layer"): (
        [0.11074606, -0.10874157, -0.11018423, 0.10931085],
        [0.43401366, 0.02540195],
        -0.13143511,
        5.28306054,
    ),
    ("key0", "rms"): (
        [0.11082973, -0.10870883, -0.11026807, 0.10927855],
        [0.43403720, 0.02549856],
        -0.13141414,
        5.28332360,
    ),
    ("column", "layer"): (
        [0.07098967, -0.13298773, -0.07030257, 0.13335096],
        [0.42208172, 0.01946069],
        -0.12156642,
        5.28299182,
    ),
    ("column", "rms"): (
        [0.07108752, -0.13295932, -0.07040056, 0.13332305],
        [0.42210580, 0.01955013],
        -0.12155240,
        5.28315148,
    ),
    ("none", "layer"): (
        [0.08408234, -0.13181243, -0.08340131, 0.13224333],
        [0.43291362, 0.02572008],
        -0.12587272,
        5.55233319,
    ),
    ("none", "rms"): (
        [0.08418535, -0.13178125, -0.08350448, 0.13221268],
        [0.43293722, 0.02581700],
        -0.12585783,
        5.55243674,
    ),
}

# After each block, in row order, with key0 sinks.
HIDDEN_L2 = [276.08559515, 279.13228884, 305.25049204, 453.08770474, 774.28720754, 1056.70591056]
HIDDEN_FIRST = [-1.61093151, -0.28572474, 3.45052875, 10.20380445, 18.63663036, 21.23205101]
HIDDEN_LAST = [0.74797704, -0.58625521, -5.24272607, -15.84224178, -28.79054019, -34.49684576]

PRINTED = 5.1e-9  # the goldens have eight decimals


def tower(sinks: str, norm: str, dtype: torch.dtype = torch.float64, **vision: Any) -> VisionTower:
    switches = {"vision_sinks": "key0" if sinks == "none" else sinks, "vision_merger_norm": norm}
    config = VisionTowerConfig.from_checkpoint(
        golden_vision.config(use_sink=sinks != "none", **vision), overrides=switches
    )
    selector = AttentionSelector("vision")
    module = VisionTower(config, selector, dtype=dtype)
    state = golden_vision.weights()
    if sinks == "none":
        state = {name: value for name, value in state.items() if not name.endswith("sinks")}
    module.load_state_dict(state)
    return module


@torch.inference_mode()
def encode(module: VisionTower) -> Tensor:
    dtype = module.merger.mlp[0].weight.dtype
    return module(golden_vision.pixels().to(dtype), golden_vision.GRIDS).double()


def near(expected: Any, tolerance: float = PRINTED) -> Any:
    return pytest.approx(expected, rel=0, abs=tolerance)


def test_formula_gives_the_published_inputs() -> None:
    weights = golden_vision.weights()
    assert len(weights) == 80
    first = weights["patch_embed.proj.weight"].flatten()[:4].tolist()
    assert first == near([0.06290433, -0.01781222, -0.02894356, 0.07299600])
    sinks = weights["blocks.1.attn.sinks"].tolist()
    assert sinks == near([1.96356265, -1.98664237, 1.82416947, -1.49131894])
    row = golden_vision.pixels()[0, :4].tolist()
    assert row == near([0.75953372, -0.92052116, 0.99553181, -0.97755968])


@pytest.mark.parametrize(("sinks", "norm"), OUTPUTS)
def test_output_in_float64(sinks: str, norm: str) -> None:
    first, last, total, length = OUTPUTS[sinks, norm]
    out = encode(tower(sinks, norm))
    assert out.shape == (22, 24)
    assert out[0, :4].tolist() == near(first)
    assert out[21, 22:].tolist() == near(last)
    assert out.sum().item() == near(total)
    assert out.norm().item() == near(length)


@pytest.mark.parametrize(("sinks", "norm"), OUTPUTS)
def test_float32_stays_close_to_float64(sinks: str, norm: str) -> None:
    single = encode(tower(sinks, norm, torch.float32))
    assert (single - encode(tower(sinks, norm))).abs().max().item() < 1e-5


def test_losing_the_band_would_show() -> None:
    out = encode(tower("none", "layer", visual_token_window_size=32))
    assert out.sum().item() == near(-0.12206400)
    assert out.norm().item() == near(5.52846538)


def test_hidden_state_after_every_block() -> None:
    module = tower("key0", "layer")
    layout = PatchLayout.of(golden_vision.GRIDS, 2, torch.device("cpu"))
    states: list[Tensor] = []

    def record(_block: Any, _inputs: Any, hidden: Tensor) -> None:
        in_columns = module.config.is_column_order(len(states))
        states.append(reorder(hidden, layout.row_order, 4) if in_columns else hidden)

    for block in module.blocks:
        block.register_forward_hook(record)
    encode(module)
    assert [state.norm().item() for state in states] == near(HIDDEN_L2)
    assert [state[0, 0].item() for state in states] == near(HIDDEN_FIRST)
    assert [state[87, 31].item() for state in states] == near(HIDDEN_LAST)
