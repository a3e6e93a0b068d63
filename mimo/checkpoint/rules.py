"""How checkpoint tensors become parameters, as data: rename, split by rows, narrow, cast."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mimo.errors import CheckpointError

logger = logging.getLogger(__name__)

QkvRows = Literal["interleaved", "plain"]


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter made of a tensor: all of it, or row ranges put one after the other, and of these
    all columns or a range."""

    name: str
    rows: tuple[tuple[int, int], ...] | None = None
    columns: tuple[int, int] | None = None

    def shape(self, source: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's shape when it is cut from a tensor of shape ``source``."""
        if self.rows is not None:
            source = (sum(stop - start for start, stop in self.rows), *source[1:])
        if self.columns is not None:
            source = (source[0], self.columns[1] - self.columns[0], *source[2:])
        return source


@dataclass(frozen=True, slots=True)
class Rename:
    """``re.sub`` on the tensor's name, after the loader has taken its prefix away."""

    pattern: str
    replacement: str


@dataclass(frozen=True, slots=True)
class Cast:
    """Another dtype than the loader's for parameters whose name the pattern finds.

    ``dtype`` is a torch dtype's name, such as "float32"; None keeps the stored one.
    """

    pattern: str
    dtype: str | None


@dataclass(frozen=True, slots=True)
class SplitFusedQkv:
    """Cuts a fused ``qkv_proj`` into ``q_proj``, ``k_proj`` and ``v_proj``, heads in natural order.

    Interleaved rows are ``[Q_0|K_0|V_0|Q_1|K_1|V_1|...]``: ``chunks`` chunks of equally many heads
    each, where ``chunks`` is the top-level ``num_key_value_heads`` for every layer, also for layers
    with more kv heads. Plain rows are ``[Q|K|V]``. ``pattern`` selects the tensors of one geometry.
    """

    pattern: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    chunks: int
    rows: QkvRows

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The three parts of tensor ``name``. Raises CheckpointError when the geometry is off."""
        chunks = 1 if self.rows == "plain" else self.chunks
        if self.num_heads % chunks or self.num_kv_heads % chunks:
            raise CheckpointError(
                f"tensor {name}: {chunks} chunks do not divide {self.num_heads} query heads"
                f" and {self.num_kv_heads} kv heads"
            )
        heads, kv_heads = self.num_heads // chunks, self.num_kv_heads // chunks
        sizes = (heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.v_head_dim)
        total = chunks * sum(sizes)
        if shape[0] != total:
            raise CheckpointError(f"tensor {name}: expected {total} rows, found {shape[0]}")
        parts, offset = [], 0
        for letter, size in zip("qkv", sizes, strict=True):
            starts = range(offset, total, sum(sizes))
            rows = tuple((start, start + size) for start in starts)
            parts.append(Part(name.replace("qkv_proj", f"{letter}_proj"), rows))
            offset += size
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class Narrow:
    """Keeps ``[start, stop)`` of a dimension, 0 rows or 1 columns, of parameters whose name the
    pattern finds. ``size`` is what that dimension has without it."""

    pattern: str
    dim: Literal[0, 1]
    start: int
    stop: int
    size: int

    def narrow(self, part: Part, source: tuple[int, ...]) -> Part:
        """The rest of ``part``, cut from a tensor of shape ``source``. Raises CheckpointError when
        that has another size."""
        shape = part.shape(source)
        if len(shape) <= self.dim or shape[self.dim] != self.size:
            raise CheckpointError(
                f"tensor {part.name}: expected {self.size} in dimension {self.dim} of its shape,"
                f" found {list(shape)}"
            )
        if self.dim == 1:
            return replace(part, columns=(self.start, self.stop))
        return replace(part, rows=_within(part.rows or ((0, source[0]),), self.start, self.stop))


Rule = Rename | SplitFusedQkv | Narrow | Cast


def parts_of(name: str, shape: tuple[int, ...], rules: Sequence[Rule]) -> tuple[Part, ...]:
    """The parameters a tensor becomes: every Rename in order, the first split that matches, then
    every Narrow."""
    for rule in rules:
        if isinstance(rule, Rename):
            name = re.sub(rule.pattern, rule.replacement, name)
    splits = (r for r in rules if isinstance(r, SplitFusedQkv) and re.search(r.pattern, name))
    split = next(splits, None)
    parts = (Part(name),) if split is None else split.parts(name, shape)
    return tuple(_narrowed(part, shape, rules) for part in parts)


def _narrowed(part: Part, source: tuple[int, ...], rules: Sequence[Rule]) -> Part:
    for rule in rules:
        if isinstance(rule, Narrow) and re.search(rule.pattern, part.name):
            part = rule.narrow(part, source)
    return part


def _within(
    ranges: Sequence[tuple[int, int]], start: int, stop: int
) -> tuple[tuple[int, int], ...]:
    """Elements ``[start, stop)`` of the ranges put one after the other, as ranges."""
    kept, offset = [], 0
    for first, last in ranges:
        low, high = max(start - offset, 0), min(stop - offset, last - first)
        if low < high:
            kept.append((first + low, first + high))
        offset += last - first
    return tuple(kept)


def qkv_rows(config: Mapping[str, Any], override: QkvRows | None = None) -> QkvRows | None:
    """The row order of fused decoder projections, None when the checkpoint has split ones.

    A fused bfloat16 tensor does not betray its order, so it is the override, else
    ``numeric_profile.qkv_rows``, else assumed to be the published one. Raises CheckpointError for
    an unknown layout or order.
    """
    layout = config.get("attention_projection_layout")
    if layout in (None, "split"):
        return None
    if layout != "fused_qkv":
        raise CheckpointError(
            f"attention_projection_layout: expected split or fused_qkv, found {layout!r}"
        )
    rows = override or (config.get("numeric_profile") or {}).get("qkv_rows")
    if rows is None:
        logger.info("rows of the fused query, key and value projections: interleaved (assumed)")
        return "interleaved"
    if rows not in ("interleaved", "plain"):
        raise CheckpointError(f"qkv_rows: expected interleaved or plain, found {rows!r}")
    return "plain" if rows == "plain" else "interleaved"
