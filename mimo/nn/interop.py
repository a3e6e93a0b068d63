"""Between tensors on the wire (bytes, dtype, shape) and torch tensors."""

import torch
from torch import Tensor

from mimo.tensor import RawTensor

_TORCH_DTYPES = {
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


def to_torch(tensor: RawTensor) -> Tensor:
    """The same bytes as a CPU tensor: shared when the buffer is writable, else copied once."""
    dtype = _TORCH_DTYPES[tensor.dtype]
    if tensor.num_bytes == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    # torch has no read-only tensors, so a read-only buffer must not be aliased.
    buffer = bytearray(tensor.data) if tensor.data.readonly else tensor.data
    return torch.frombuffer(buffer, dtype=dtype).reshape(tensor.shape)


def from_torch(tensor: Tensor) -> RawTensor:
    """The tensor's bytes: shared when it is contiguous and on the CPU, else copied once.

    Raises ValueError for a dtype that does not travel, such as float64.
    """
    if tensor.dtype not in _NAMES:
        raise ValueError(f"dtype {tensor.dtype} does not travel between processes")
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return RawTensor(_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data)
