"""Packed weights give the bits of plain ones, whoever multiplies with whom."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mimo.nn.linear import Linear, can_pack, pack_weights, packed, product
from mimo.nn.mlp import SwiGLU

WIDTH, HEIGHT = 48, 40

needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16, "cpu"), reason="this CPU or this torch has no bfloat16 kernels"
)


def layer(*, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> Linear:
    torch.manual_seed(0)
    return Linear(WIDTH, HEIGHT, bias=bias, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_it_is_the_plain_product(rows: int, bias: bool, dtype: torch.dtype) -> None:
    linear = layer(bias=bias, dtype=dtype)
    x = torch.randn(rows, WIDTH, dtype=dtype)
    expected = x.double() @ linear.weight.double().T
    if linear.bias is not None:
        expected = expected + linear.bias.double()
    out = linear(x)
    assert out.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_a_packed_weight_gives_the_same_bits(rows: int, bias: bool) -> None:
    plain, linear = layer(bias=bias), layer(bias=bias)
    pack_weights(linear)
    assert linear.weight.is_mkldnn
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(linear(x), plain(x))


@needs_packing
def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    weight = packed(torch.randn(512, 256, dtype=torch.bfloat16))
    x = torch.randn(130, 256, dtype=torch.bfloat16)
    whole = product(x, weight)
    for count in (1, 2, 7, 33):
        assert torch.equal(product(x[:count], weight), whole[:count])


@needs_packing
def test_operands_need_not_be_contiguous() -> None:
    torch.manual_seed(0)
    weight = torch.randn(HEIGHT, WIDTH, dtype=torch.bfloat16)
    x = torch.randn(4, 2 * WIDTH, dtype=torch.bfloat16)[:, ::2]
    part = torch.randn(3 * HEIGHT, WIDTH, dtype=torch.bfloat16)[HEIGHT : 2 * HEIGHT]
    for matrix in (weight, part):
        assert torch.equal(product(x, packed(matrix)), F.linear(x, matrix))


@needs_packing
def test_all_weights_below_a_module_are_packed() -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"mlp": SwiGLU(WIDTH, HEIGHT), "norm": nn.LayerNorm(WIDTH)})
    plain = plain.to(torch.bfloat16)
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = plain["mlp"](x)
        pack_weights(plain)
        assert torch.equal(plain["mlp"](x), expected)
    names = [name for name, each in plain.named_parameters() if each.is_mkldnn]
    assert names == ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float32, "cpu"), (torch.bfloat16, "cuda"), (torch.float16, "cpu")]
)
def test_what_is_not_packed(dtype: torch.dtype, device: str) -> None:
    assert not can_pack(dtype, device)


def test_a_torch_without_these_operations_cannot_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mimo.nn.linear._OPERATIONS", ("_not_there",))
    assert not can_pack(torch.bfloat16, "cpu")
