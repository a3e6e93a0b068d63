"""Products with plain and packed weights, whoever multiplies with whom."""

import pytest
import torch
from torch import nn

from mimo.nn import linear as linears
from mimo.nn import native
from mimo.nn.linear import Linear, OneDnnWeight, Packing, pack_weights, packing_for
from mimo.nn.mlp import SwiGLU
from mimo.nn.panels import Panels
from tests.support.kernels import each_packing, needs_onednn, needs_panels

WIDTH, HEIGHT = 48, 40
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def layer(
    width: int = WIDTH, height: int = HEIGHT, *, bias: bool = False, dtype: torch.dtype
) -> Linear:
    torch.manual_seed(0)
    return Linear(width, height, bias=bias, dtype=dtype)


def exact(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    out = x.double() @ linear.weight.double().T
    return out if linear.bias is None else out + linear.bias.double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_it_is_the_plain_product(rows: int, bias: bool, dtype: torch.dtype) -> None:
    linear = layer(bias=bias, dtype=dtype)
    x = torch.randn(rows, WIDTH, dtype=dtype)
    assert linear(x).dtype == dtype
    assert_close(linear(x), exact(linear, x))


@each_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 50])
@pytest.mark.parametrize(("width", "height"), [(2, 1), (48, 40), (50, 64), (192, 200), (512, 129)])
def test_a_packed_weight_gives_the_same_product(
    packing: Packing, dtype: torch.dtype, width: int, height: int, rows: int, bias: bool
) -> None:
    linear = layer(width, height, bias=bias, dtype=dtype)
    x = torch.randn(rows, width, dtype=dtype)
    expected = exact(linear, x)
    with torch.inference_mode():
        pack_weights(linear, packing)
        out = linear(x)
    assert out.dtype == dtype
    assert_close(out, expected)


@needs_onednn
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_onednn_gives_the_bits_of_the_plain_product(rows: int) -> None:
    linear = layer(dtype=torch.bfloat16)
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(OneDnnWeight(linear.weight).product(x), linear(x))


@each_packing
def test_a_row_does_not_depend_on_the_others(packing: Packing, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = packing(torch.randn(512, 256, dtype=dtype))
    x = torch.randn(130, 256, dtype=dtype)
    whole = weight.product(x)
    for count in (1, 2, 7, 33):
        assert torch.equal(weight.product(x[:count]), whole[:count])


@each_packing
def test_threads_change_no_bit(packing: Packing, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = packing(torch.randn(500, 256, dtype=dtype))
    x = torch.randn(100, 256, dtype=dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = weight.product(x)
        torch.set_num_threads(2)
        assert torch.equal(weight.product(x), one)
    finally:
        torch.set_num_threads(before)


@each_packing
def test_operands_need_not_be_contiguous(packing: Packing, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3 * HEIGHT, WIDTH, dtype=dtype)[HEIGHT : 2 * HEIGHT]
    whole = torch.randn(2, 4, 2 * WIDTH, dtype=dtype)
    for x in (whole[..., :WIDTH], whole[..., ::2], whole[:, 1, :WIDTH], whole[0, 0, :WIDTH]):
        expected = x.double() @ weight.double().T
        assert_close(packing(weight).product(x), expected)


@each_packing
def test_a_nan_stays_in_its_row(packing: Packing, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = packing(torch.randn(HEIGHT, WIDTH, dtype=dtype))
    x = torch.randn(8, WIDTH, dtype=dtype)
    clean = weight.product(x)
    x[3, 5] = float("nan")
    out = weight.product(x)
    assert out[3].isnan().all()
    rest = [row for row in range(8) if row != 3]
    assert torch.equal(out[rest], clean[rest])


@each_packing
def test_all_weights_below_a_module_are_packed(packing: Packing, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"mlp": SwiGLU(WIDTH, HEIGHT), "norm": nn.LayerNorm(WIDTH)}).to(dtype)
    x = torch.randn(3, WIDTH, dtype=dtype)
    with torch.inference_mode():
        expected = plain["mlp"](x)
        pack_weights(plain, packing)
        torch.testing.assert_close(plain["mlp"](x), expected, rtol=1e-2, atol=1e-2)
    names = [name for name, _ in plain.named_parameters()]
    assert names == ["norm.weight", "norm.bias"]  # nothing is held twice


@needs_panels
def test_pairs_of_inputs_must_be_whole() -> None:
    with pytest.raises(ValueError, match="inputs come in pairs, got 7"):
        Panels(torch.zeros(3, 7, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "device"),
    [(torch.float32, "cuda"), (torch.bfloat16, "cuda"), (torch.float16, "cpu")],
)
def test_what_is_not_packed(dtype: torch.dtype, device: str) -> None:
    assert packing_for(dtype, device) is None


@pytest.mark.parametrize("can_compile", [False, True])
@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("has_operations", [False, True])
def test_who_packs(
    can_compile: bool, has_amx: bool, has_operations: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare() -> None:
        if not can_compile:
            raise native.KernelUnavailable("no compiler")

    monkeypatch.setattr(Panels, "prepare", prepare)
    capabilities = {"amx_bf16": has_amx}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(linears, "_has_onednn", lambda: has_operations)
    assert packing_for(torch.float32, "cpu") is (Panels if can_compile else None)
    onednn = OneDnnWeight if has_operations else None
    panels = Panels if can_compile else onednn
    assert packing_for(torch.bfloat16, "cpu") is (
        OneDnnWeight if has_operations and has_amx else panels
    )


def test_a_torch_without_these_operations_has_no_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_ONEDNN_OPERATIONS", ("_not_there",))
    assert not linears._has_onednn()
