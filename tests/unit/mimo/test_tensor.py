"""Raw tensors and their chunks: sizes are checked, damage is found."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.errors import InvalidRequest
from mimo.tensor import Assembler, Chunk, RawTensor, crc32c, split


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_crc32c_is_castagnoli(kind: type) -> None:
    assert crc32c(kind(b"123456789")) == 0xE3069283  # the check value of CRC-32C
    assert crc32c(kind(b"")) == 0


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 64))
def test_split_then_assemble_is_the_identity(rows: int, width: int, chunk_bytes: int) -> None:
    tensor = RawTensor("int16", (rows, width), bytes(i % 251 for i in range(rows * width * 2)))
    assembler = Assembler("int16", (rows, width))
    for chunk in split(tensor, chunk_bytes):
        assert not assembler.is_complete
        assembler.add(chunk)
    assert assembler.is_complete
    assert assembler.finish().data == tensor.data


def test_rows_is_a_view() -> None:
    data = bytearray(range(24))
    tensor = RawTensor("uint8", (6, 4), data)
    part = tensor.rows(2, 4)
    assert part.shape == (2, 4) and bytes(part.data) == bytes(range(8, 16))
    data[8] = 99
    assert part.data[0] == 99


def test_a_tensor_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs 16 bytes, got 15"):
        RawTensor("float32", (2, 2), bytes(15))


@pytest.mark.parametrize("damage", ["flip", "skip", "swap", "late", "long", "short"])
def test_a_damaged_upload_is_refused(damage: str) -> None:
    tensor = RawTensor("uint8", (10,), bytes(range(10)))
    chunks = list(split(tensor, 4))
    if damage == "flip":
        chunks[1] = Chunk(1, 4, b"\x00\x05\x06\x07", chunks[1].crc32c, False)
    elif damage == "skip":
        del chunks[1]
    elif damage == "swap":
        chunks[0], chunks[1] = chunks[1], chunks[0]
    elif damage == "late":
        chunks.append(Chunk(3, 10, b"", crc32c(b""), True))
    elif damage == "long":
        chunks[2] = Chunk(2, 8, bytes(3), crc32c(bytes(3)), True)
    elif damage == "short":
        del chunks[2]
    assembler = Assembler("uint8", (10,))
    with pytest.raises(InvalidRequest):
        for chunk in chunks:
            assembler.add(chunk)
        assembler.finish()


def test_a_header_over_the_limit_is_refused_before_allocation() -> None:
    with pytest.raises(InvalidRequest, match="limit"):
        Assembler("float32", (1 << 40,), max_bytes=1 << 20)
