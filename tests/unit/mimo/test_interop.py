"""Tensors on the wire and in torch hold the same bytes."""

import pytest
import torch

from mimo.nn.interop import from_torch, to_torch
from mimo.tensor import RawTensor

DTYPES = [
    torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0, 7)])
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    raw = from_torch(tensor)
    assert raw.shape == shape and raw.num_bytes == tensor.numel() * tensor.element_size()
    assert torch.equal(to_torch(raw), tensor)


def test_a_writable_buffer_is_shared() -> None:
    buffer = bytearray(8)
    tensor = to_torch(RawTensor("float32", (2,), buffer))
    buffer[:4] = b"\x00\x00\x80\x3f"
    assert tensor.tolist() == [1.0, 0.0]


def test_a_read_only_buffer_is_copied() -> None:
    data = bytes(8)
    tensor = to_torch(RawTensor("float32", (2,), data))
    tensor.fill_(1.0)
    assert data == bytes(8)


def test_a_contiguous_tensor_is_shared() -> None:
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    raw = from_torch(tensor)
    tensor.fill_(1.0)
    assert bytes(raw.data) == b"\x80\x3f" * 2


def test_a_transposed_tensor_travels_row_major() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3).T
    assert torch.equal(to_torch(from_torch(tensor)), tensor)


def test_a_tensor_with_gradient_travels() -> None:
    assert from_torch(torch.ones(2, requires_grad=True)).shape == (2,)


def test_float64_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        from_torch(torch.zeros(1, dtype=torch.float64))
