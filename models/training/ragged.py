"""Many arrays of different shapes in one file on disk, read through the page cache."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_VALUES, _SHAPES = "values.npy", "shapes.npy"


class Ragged(Sequence[Array]):
    """Arrays of one dtype and rank. They are views of the mapped file: copy before changing."""

    def __init__(self, folder: Path) -> None:
        self._values = np.load(folder / _VALUES, mmap_mode="r")
        self._shapes = np.load(folder / _SHAPES)  # [N, rank]
        self._ends = np.cumsum(self._shapes.prod(axis=1))  # [N]

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: Any) -> Any:
        end, shape = self._ends[index], self._shapes[index]
        return self._values[end - shape.prod() : end].reshape(shape)

    def __iter__(self) -> Iterator[Array]:
        return (self[index] for index in range(len(self)))

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of an array, without reading it."""
        return tuple(self._shapes[index].tolist())


def write_ragged(folder: Path, arrays: Iterable[Array]) -> None:
    """Store arrays of one dtype and rank, at least one."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = list(arrays)
    shapes = np.array([array.shape for array in arrays], np.int64)
    values = np.lib.format.open_memmap(
        folder / _VALUES, "w+", arrays[0].dtype, (int(shapes.prod(axis=1).sum()),)
    )
    end = 0
    for array in arrays:
        values[end : end + array.size] = array.ravel()
        end += array.size
    values.flush()
    np.save(folder / _SHAPES, shapes)
