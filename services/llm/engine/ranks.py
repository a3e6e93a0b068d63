"""A runner that is several processes.

Rank 0 plans and samples. Before it runs a pass it tells the others which: positions, block tables
and token ids, packed as msgpack. Everything else they need they compute, or get from it as a tensor
on the way. Whatever goes wrong in a pass, on any rank, ends all of them: nobody knows any more at
which meeting the others wait.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgpack
import torch
from torch import Tensor

from mimo.nn.device import Compute
from services.llm.engine.batch import Batch, Segment
from services.llm.engine.kv_cache import KVCache
from services.llm.engine.request import Request, SamplingParams
from services.llm.engine.runner import Runner, encoder_rows
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.llm.model.parallel import RankLost, Shard

ENCODER_ROW = -1  # in the place of an id: no rank has an embedding for it


class Followers(Protocol):
    """The other ranks, seen from rank 0."""

    def tell(self, command: bytes) -> None:
        """Give all of them the next command. Raises OSError for one that is gone."""

    def explain(self, error: Exception) -> str:
        """Why a pass failed: what became of a rank, if anything did, else the error."""


class LeadingRunner(Runner):
    """Rank 0's. Raises RankLost for whatever fails in a pass."""

    def __init__(
        self,
        decoder: Decoder,
        mtp: Mtp | None,
        cache: KVCache,
        device: str,
        shard: Shard,
        followers: Followers,
    ) -> None:
        super().__init__(decoder, mtp, cache, device, shard)
        self._followers = followers

    def forward(self, batch: Batch, input_ids: Sequence[int]) -> Tensor:
        ids = _known_ids(batch, input_ids, shift=0)
        with self._together("forward", *_rows(batch), ids):
            return super().forward(batch, ids)

    def draft(self, depth: int, batch: Batch, input_ids: Sequence[int], hidden: Tensor) -> Tensor:
        ids = _known_ids(batch, input_ids, shift=1 + depth)
        with self._together("draft", depth, *_rows(batch), ids):
            return super().draft(depth, batch, ids, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        with self._together("logits", len(hidden)):
            return super().logits(hidden)

    def scrub(self, group: str, blocks: Sequence[int]) -> None:
        with self._together("scrub", group, list(blocks)):
            super().scrub(group, blocks)

    @contextmanager
    def _together(self, *command: Any) -> Iterator[None]:
        try:
            self._followers.tell(msgpack.packb(command))
            yield
        except Exception as error:
            raise RankLost(self._followers.explain(error)) from error


def follow(runner: Runner, commands: Iterable[bytes], hidden_size: int, compute: Compute) -> None:
    """Take part in rank 0's passes until there are no more commands. Raises what fails."""

    def blank(num_rows: int) -> Tensor:
        return torch.zeros(num_rows, hidden_size, dtype=compute.dtype, device=compute.device)

    for command in commands:
        match msgpack.unpackb(command):
            case ["forward", spans, tables, ids]:
                runner.forward(_batch(runner, spans, tables), ids)
            case ["draft", depth, spans, tables, ids]:
                runner.draft(depth, _batch(runner, spans, tables), ids, blank(len(ids)))
            case ["logits", num_rows]:
                runner.logits(blank(num_rows))
            case ["scrub", group, blocks]:
                runner.scrub(group, blocks)


def _rows(batch: Batch) -> tuple[list[tuple[int, int]], list[dict[str, list[int]]]]:
    """Start and number of rows of each segment, and its block tables by layer group."""
    spans = [(segment.start, segment.num_rows) for segment in batch.segments]
    return spans, [segment.request.block_tables for segment in batch.segments]


def _batch(
    runner: Runner, spans: Sequence[tuple[int, int]], tables: Sequence[dict[str, list[int]]]
) -> Batch:
    """What :func:`_rows` came from. Of a request, a follower knows its blocks and nothing else."""
    return runner.build(
        [
            Segment(
                Request("", [], 0, SamplingParams(max_tokens=1), block_tables=table), start, count
            )
            for (start, count), table in zip(spans, tables, strict=True)
        ]
    )


def _known_ids(batch: Batch, input_ids: Sequence[int], shift: int) -> list[int]:
    """The ids, without those in the place of encoder rows, which rank 0 alone has."""
    ids = list(input_ids)
    for place, rows in encoder_rows(batch, shift):
        ids[place] = [ENCODER_ROW] * len(rows)
    return ids
