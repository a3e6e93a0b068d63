"""One model in several processes: what each of them holds, and where they meet.

Every rank builds the ordinary modules with the shapes of its share (:func:`share_of`): some of the
heads, and a part of the width of every feed-forward and of every expert. Attention and feed-forward
then give partial sums, so the ranks meet twice a layer, and each time all get the same bits. Norms,
gates and the joining projection of MTP blocks are on every rank. The vocabulary is cut by rows.

A :class:`Shard` says which rank this is and adds up; :data:`WHOLE`, the default everywhere, gives
back what it is given.
"""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from mimo.errors import ConfigError
from services.llm.model.config import DecoderConfig, LayerSpec

# A rank that hangs, without being dead or stopped, is given up on after this; a slow one is not.
MEETING_TIMEOUT = timedelta(seconds=60)


class RankLost(RuntimeError):
    """The ranks no longer compute together. Nothing that this process starts now would end well."""


class Shard:
    """Rank 0 of 1: a whole model. Adds nothing to what it computes."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, the same bits on each. May overwrite ``x``."""
        return x

    def from_first(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``. The others give a tensor of its shape, which may be overwritten."""
        return x

    def columns(self, x: Tensor, total: int) -> Tensor:
        """Put vocabulary columns together. x: [R, own] -> [R, total] on rank 0, x elsewhere."""
        return x

    def abort(self) -> None:
        """Let go of a meeting that cannot take place any more, from another thread."""


WHOLE = Shard()


class GroupShard(Shard):
    """One of several ranks, which meet in a process group. Every method raises RankLost.

    Without a ``group`` it knows its share already, and meets the others after :meth:`join`.
    """

    def __init__(self, rank: int, size: int, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def join(self, rendezvous: Path, device_type: str) -> None:
        """Meet the others through a file that only they know: over NCCL on GPUs, else over gloo."""
        store = distributed.FileStore(str(rendezvous), self.size)
        open_group = nccl if device_type == "cuda" else gloo
        try:
            self._group = open_group(store, self.rank, self.size)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size} met nobody: {error}") from error

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._meet(self._group.allreduce, [x])
        return x

    def from_first(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._meet(self._group.broadcast, [x], options)
        return x

    def columns(self, x: Tensor, total: int) -> Tensor:
        widths = [len(vocabulary_rows(total, rank, self.size)) for rank in range(self.size)]
        padded = F.pad(x, (0, max(widths) - x.shape[1])).contiguous()  # all of one shape
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._meet(self._group.gather, [parts] if parts else [], [padded], options)
        if self.rank != 0:
            return x
        return torch.cat([p[:, :width] for p, width in zip(parts, widths, strict=True)], dim=1)

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _meet(self, collective: Any, *arguments: Any) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank}: the other ranks do not answer") from error


def gloo(store: Any, rank: int, size: int) -> Any:
    """A group of processes of one machine, or of threads that share ``store``."""
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = MEETING_TIMEOUT
    return distributed.ProcessGroupGloo(store, rank, size, options)


def nccl(store: Any, rank: int, size: int) -> Any:
    """A group of processes with a GPU each."""
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = MEETING_TIMEOUT
    return distributed.ProcessGroupNCCL(store, rank, size, options)


# ── who holds what ──


def share_of(config: DecoderConfig, size: int) -> DecoderConfig:
    """The configuration of one rank's modules; the vocabulary stays whole in it.

    Raises ConfigError for a number of ranks that does not divide the model.
    """
    if size == 1:
        return config
    return replace(
        config,
        layers=tuple(_layer_share(spec, size) for spec in config.layers),
        mtp_layer=_layer_share(config.mtp_layer, size),
        intermediate_size=_divide(config.intermediate_size, size, "intermediate_size"),
        moe_intermediate_size=_divide(config.moe_intermediate_size, size, "moe_intermediate_size"),
        fused_qkv=False,  # the rank's rows are taken apart when they are read
    )


def head_range(spec: LayerSpec, shard: Shard) -> range:
    """Query heads of the whole layer ``spec`` that a rank holds."""
    own = spec.num_heads // shard.size
    return range(shard.rank * own, (shard.rank + 1) * own)


def kv_head_range(spec: LayerSpec, shard: Shard) -> range:
    """Its key-value heads: those its query heads read. Fewer heads than ranks are shared."""
    group = spec.num_heads // spec.num_kv_heads
    heads = head_range(spec, shard)
    return range(heads.start // group, heads[-1] // group + 1)


def vocabulary_rows(vocab_size: int, rank: int, size: int) -> range:
    """Rows of embedding and head that a rank holds: as many as the others, or one more."""
    return range(rank * vocab_size // size, (rank + 1) * vocab_size // size)


class VocabularyShard(nn.Embedding):
    """A rank's rows of the embedding, zero for the ids of others. Ids below 0 are nobody's."""

    def __init__(
        self, vocab_size: int, hidden_size: int, shard: Shard, *, dtype: torch.dtype
    ) -> None:
        rows = vocabulary_rows(vocab_size, shard.rank, shard.size)
        super().__init__(len(rows), hidden_size, dtype=dtype)
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [T] -> [T, D]; the sum over all ranks is the embedding."""
        foreign = (ids < self.rows.start) | (ids >= self.rows.stop)  # [T]
        rows = super().forward((ids - self.rows.start).masked_fill(foreign, 0))  # [T, D]
        return rows.masked_fill(foreign[:, None], 0)


def embedding(
    vocab_size: int, hidden_size: int, shard: Shard, *, dtype: torch.dtype
) -> nn.Embedding:
    """The whole table for a whole model, else the rank's part."""
    if shard.size == 1:
        return nn.Embedding(vocab_size, hidden_size, dtype=dtype)
    return VocabularyShard(vocab_size, hidden_size, shard, dtype=dtype)


def _layer_share(spec: LayerSpec, size: int) -> LayerSpec:
    heads = _divide(spec.num_heads, size, f"query heads of layer {spec.index}")
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ConfigError(
            f"--tensor-parallel {size} neither divides nor is a multiple of the "
            f"{spec.num_kv_heads} key-value heads of layer {spec.index}"
        )
    return replace(spec, num_heads=heads, num_kv_heads=max(spec.num_kv_heads // size, 1))


def _divide(total: int, size: int, what: str) -> int:
    if total % size:
        raise ConfigError(f"--tensor-parallel {size} does not divide {what} {total}")
    return total // size
