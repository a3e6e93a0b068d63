"""Laws of the tower that hold for any weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.nn.attention import AttentionSelector
from services.vision.config import VisionTowerConfig
from services.vision.model import VisionTower
from tests.support import golden_vision

WIDE = 1000  # a band wider than any frame here


def tower(dtype: torch.dtype = torch.float64, **vision: Any) -> VisionTower:
    """A tower of random weights, sinks included."""
    config = VisionTowerConfig.from_checkpoint(golden_vision.config(**vision))
    selector = AttentionSelector("vision")
    torch.manual_seed(1)
    module = VisionTower(config, selector, dtype=dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter) * 3)
    return module


def one_block(kind: int, **vision: Any) -> VisionTower:
    return tower(depth=1, vit_window_attn_types=[kind], fullatt_block_indexes=[], **vision)


@torch.inference_mode()
def block_output(module: VisionTower, patches: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
    """The last block's output, in the order that the block sees."""
    outputs: list[Tensor] = []
    handle = module.blocks[-1].register_forward_hook(lambda _m, _i, out: outputs.append(out))
    module(patches, grids)
    handle.remove()
    return outputs[0]


def patches(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 96, generator=torch.Generator().manual_seed(2), dtype=dtype)


@torch.inference_mode()
def test_permuting_items_permutes_tokens() -> None:
    module = tower()
    x = patches(24 + 64 + 8)
    image, clip, strip = x[:24], x[24:88], x[88:]
    grids = [(1, 4, 6), (2, 8, 4), (1, 2, 4)]
    straight = module(x, grids).split([6, 16, 2])
    turned = module(torch.cat([strip, image, clip]), [grids[2], grids[0], grids[1]])
    moved = turned.split([2, 6, 16])
    for one, other in zip(straight, [moved[1], moved[2], moved[0]], strict=True):
        assert (one - other).abs().max().item() < 1e-12


@torch.inference_mode()
def test_frames_do_not_see_each_other() -> None:
    module = tower()
    x = patches(3 * 32)
    changed = x.clone()
    changed[32:64] += 1
    before, after = module(x, [(3, 8, 4)]), module(changed, [(3, 8, 4)])
    assert before[:8].equal(after[:8])
    assert before[16:].equal(after[16:])
    assert (before[8:16] - after[8:16]).abs().min().item() > 0


@pytest.mark.parametrize("kind", [0, 1])
def test_key0_sink_reaches_only_rows_whose_band_holds_the_first_key(kind: int) -> None:
    module = one_block(kind)
    x = patches(24 + 32)
    grids = [(1, 4, 6), (1, 8, 4)]
    before = block_output(module, x, grids)
    with torch.no_grad():
        module.blocks[0].attn.sinks += 1
    changed = (block_output(module, x, grids) != before).any(dim=1)
    window = 5
    expected = torch.zeros(24 + 32, dtype=torch.bool)
    expected[: window + 1] = True
    expected[24 : 24 + window + 1] = True
    assert changed.equal(expected)


@torch.inference_mode()
def test_key0_sink_of_zero_is_no_sink() -> None:
    with_sinks, without = tower(), tower(use_sink=False)
    state = with_sinks.state_dict()
    for name, value in state.items():
        if name.endswith("sinks"):
            value.zero_()
    without.load_state_dict({n: v for n, v in state.items() if not n.endswith("sinks")})
    x = patches(24)
    assert (with_sinks(x, [(1, 4, 6)]) - without(x, [(1, 4, 6)])).abs().max().item() < 1e-12


@torch.inference_mode()
@pytest.mark.parametrize("types", [[0, 1, 0], [0, 0, 1], [1, 0, 1]])
def test_order_does_not_matter_when_the_band_covers_the_frame(types: list[int]) -> None:
    """Also when the last block is in column order: tokens leave in row order."""
    shape = {"depth": 3, "fullatt_block_indexes": [], "visual_token_window_size": WIDE}
    by_rows = tower(vit_window_attn_types=[0, 0, 0], **shape)
    mixed = tower(vit_window_attn_types=types, **shape)
    mixed.load_state_dict(by_rows.state_dict())
    x = patches(24 + 64)
    grids = [(1, 4, 6), (2, 8, 4)]
    assert (by_rows(x, grids) - mixed(x, grids)).abs().max().item() < 1e-12


@torch.inference_mode()
def test_order_matters_when_the_band_is_narrow() -> None:
    by_rows, by_columns = one_block(0), one_block(1)
    by_columns.load_state_dict(by_rows.state_dict())
    x = patches(24)
    assert (by_rows(x, [(1, 4, 6)]) - by_columns(x, [(1, 4, 6)])).abs().max().item() > 1e-3


def test_every_parameter_learns() -> None:
    module = tower(torch.float32)
    module(patches(24, torch.float32), [(1, 4, 6)]).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum().item() > 0, name


def test_training_after_inference_sees_no_inference_tensor() -> None:
    module = tower(torch.float32)
    x = patches(40, torch.float32)
    with torch.inference_mode():
        module(x, [(1, 4, 10)])
    module(x, [(1, 4, 10)]).sum().backward()


@torch.inference_mode()
def test_bfloat16_tower_answers_in_bfloat16() -> None:
    out = tower(torch.bfloat16)(patches(24, torch.float32), [(1, 4, 6)])
    assert out.dtype == torch.bfloat16
    exact = tower(torch.float32)(patches(24, torch.float32), [(1, 4, 6)])
    assert ((out.float() - exact).norm() / exact.norm()).item() < 0.03
