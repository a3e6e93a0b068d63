"""Tensors on the wire: headers and chunks to and from their protobuf messages."""

from collections.abc import Iterator

from mimo.errors import InvalidRequest
from mimo.tensor import Chunk, RawTensor, split
from mimo.v1 import tensor_pb2

_TO_PROTO = {
    "uint8": tensor_pb2.DTYPE_UINT8,
    "int16": tensor_pb2.DTYPE_INT16,
    "int32": tensor_pb2.DTYPE_INT32,
    "int64": tensor_pb2.DTYPE_INT64,
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
    "float32": tensor_pb2.DTYPE_FLOAT32,
}
_FROM_PROTO = {value: name for name, value in _TO_PROTO.items()}


def dtype_to_proto(dtype: str) -> tensor_pb2.Dtype.ValueType:
    return _TO_PROTO[dtype]


def dtype_from_proto(dtype: tensor_pb2.Dtype.ValueType) -> str:
    """Raises InvalidRequest for DTYPE_UNSPECIFIED or a number this version does not know."""
    if dtype not in _FROM_PROTO:
        raise InvalidRequest(f"unknown dtype {dtype}", field="dtype")
    return _FROM_PROTO[dtype]


def header_to_proto(dtype: str, shape: tuple[int, ...]) -> tensor_pb2.TensorHeader:
    return tensor_pb2.TensorHeader(dtype=_TO_PROTO[dtype], shape=shape)


def header_from_proto(header: tensor_pb2.TensorHeader) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape. Raises InvalidRequest for an unknown dtype."""
    return dtype_from_proto(header.dtype), tuple(header.shape)


def chunk_to_proto(chunk: Chunk) -> tensor_pb2.TensorChunk:
    return tensor_pb2.TensorChunk(
        index=chunk.index,
        offset=chunk.offset,
        data=bytes(chunk.data),
        crc32c=chunk.crc32c,
        last=chunk.last,
    )


def chunk_from_proto(chunk: tensor_pb2.TensorChunk) -> Chunk:
    return Chunk(chunk.index, chunk.offset, chunk.data, chunk.crc32c, chunk.last)


def chunks_to_proto(tensor: RawTensor) -> Iterator[tensor_pb2.TensorChunk]:
    """A whole tensor as wire chunks of at most 1 MiB."""
    return (chunk_to_proto(chunk) for chunk in split(tensor))
