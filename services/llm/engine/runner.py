"""Forward passes over the cache. Inference mode lives here, not in the model."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from services.llm.engine import batch as batches
from services.llm.engine.batch import Batch, PagedAttend, Segment
from services.llm.engine.kv_cache import KVCache
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.llm.model.parallel import WHOLE, Shard


class Runner:
    """One decoder, its MTP blocks and its cache on one device.

    With a ``shard`` it is one rank of several, all of which make the same calls. Encoder rows,
    hidden states and logits are rank 0's; of the others' only the shapes count.
    """

    def __init__(
        self,
        decoder: Decoder,
        mtp: Mtp | None,
        cache: KVCache,
        device: str,
        shard: Shard = WHOLE,
    ) -> None:
        self.cache = cache
        self._decoder = decoder
        self._mtp = mtp
        self._device = device
        self._shard = shard

    @property
    def num_mtp_blocks(self) -> int:
        return 0 if self._mtp is None else len(self._mtp.layers)

    def build(self, segments: Sequence[Segment]) -> Batch:
        return batches.build(segments, self.cache.groups, self.cache.block_size, self._device)

    @torch.inference_mode()
    def forward(self, batch: Batch, input_ids: Sequence[int]) -> Tensor:
        """Run the main model over all rows; their keys and values are cached. -> [T, D]."""
        x = self._embed(batch, input_ids, shift=0)  # [T, D]
        hidden: Tensor = self._decoder(x, batch.positions, PagedAttend(self.cache, batch))
        return hidden

    @torch.inference_mode()
    def draft(self, depth: int, batch: Batch, input_ids: Sequence[int], hidden: Tensor) -> Tensor:
        """Run MTP block ``depth`` over rows whose main hidden states are [T, D]. -> [T, D].

        ``input_ids`` are those of positions + 1 + depth.
        """
        assert self._mtp is not None
        hidden = self._shard.from_first(hidden)
        x = self._embed(batch, input_ids, shift=1 + depth)  # [T, D]
        attend = PagedAttend(self.cache, batch)
        return self._mtp.layer(depth, x, hidden, batch.positions, attend)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, D] -> [R, V] float32, or wider."""
        logits = self._decoder.logits(self._shard.from_first(hidden))
        return logits if logits.dtype == torch.float64 else logits.float()

    def scrub(self, group: str, blocks: Sequence[int]) -> None:
        """Zero blocks that hold NaN, before anyone else gets them."""
        self.cache.scrub(group, blocks)

    def _embed(self, batch: Batch, input_ids: Sequence[int], shift: int) -> Tensor:
        """Embeddings of the tokens ``shift`` after each row, encoder rows in place. -> [T, D]."""
        ids = torch.tensor(input_ids, device=self._device)
        x = self._decoder.embed(ids)
        for place, rows in encoder_rows(batch, shift):
            x[place] = rows.to(x)
        return self._shard.sum(x)


def encoder_rows(batch: Batch, shift: int) -> Iterator[tuple[slice, Tensor]]:
    """Where the tokens ``shift`` after the batch's rows are encoder rows, and these: [count, D]."""
    for segment, row in zip(batch.segments, batch.row_starts, strict=True):
        request, start = segment.request, segment.start + shift
        for span, first, last in request.spans_within(start, segment.stop + shift):
            source = span.row_offset + first - span.offset
            rows = request.item_rows[span.item_index][source : source + last - first]
            yield slice(row + first - start, row + last - start), rows
