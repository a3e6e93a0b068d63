"""The path of a few rows agrees with the plain product, and is taken where it should be."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.nn import linear as linear_module
from mimo.nn.linear import FEW_ROWS, Linear

WIDTH, HEIGHT = 48, 40


class Operations(TorchDispatchMode):
    """Remembers the names of what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def layer(*, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> Linear:
    torch.manual_seed(0)
    return Linear(WIDTH, HEIGHT, bias=bias, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, FEW_ROWS, FEW_ROWS + 1])
def test_any_number_of_rows_is_the_plain_product(rows: int, bias: bool, dtype: torch.dtype) -> None:
    linear = layer(bias=bias, dtype=dtype)
    x = torch.randn(rows, WIDTH, dtype=dtype)
    expected = x.double() @ linear.weight.double().T
    if linear.bias is not None:
        expected = expected + linear.bias.double()
    out = linear(x)
    assert out.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("rows", "has_matrices", "product"),
    [
        (1, True, "mv"),
        (1, False, "mv"),
        (2, True, "weight first"),
        (FEW_ROWS, True, "weight first"),
        (FEW_ROWS + 1, True, "plain"),
        (2, False, "plain"),
    ],
)
def test_where_the_weight_is_read_as_it_is(
    monkeypatch: pytest.MonkeyPatch, rows: int, has_matrices: bool, product: str
) -> None:
    monkeypatch.setattr(linear_module, "multiplies_bf16", lambda: has_matrices)
    with torch.no_grad(), Operations() as operations:
        layer()(torch.ones(rows, WIDTH, dtype=torch.bfloat16))
    is_vector = any("mv" in name for name in operations.names)
    is_weight_first = any("clone" in name for name in operations.names)  # back into rows
    assert {"mv": (True, False), "weight first": (False, True), "plain": (False, False)}[
        product
    ] == (is_vector, is_weight_first)


@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_of_few_rows_are_those_of_the_plain_product(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(linear_module, "multiplies_bf16", lambda: True)
    linear = layer()
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    fast = torch.autograd.grad(linear(x).sum(), (x, linear.weight))
    plain = torch.autograd.grad((x @ linear.weight.T).sum(), (x, linear.weight))
    for got, expected in zip(fast, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
