"""Examples packed for the decoder, with the encoders' rows put in their places."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from models.training.corpus import SPLITS
from models.training.examples import Example, Item
from models.training.features import IN_BF16, PICTURES
from models.training.networks import Networks
from models.training.ragged import Ragged
from services.llm.model.attention import FullSequences
from services.llm.model.decoder import merge_embeddings

# Sequences are padded at their end to few different lengths: equal lengths share attention calls.
# A causal model's earlier rows do not see it.
_LENGTH_MULTIPLE = 8


class Encoded:
    """What the frozen encoders made of the data sets."""

    def __init__(self, folder: Path) -> None:
        codes = (*SPLITS["sounds"], IN_BF16)
        self._stored = {("sounds", split): Ragged(folder / "codes" / split) for split in codes}
        for name in PICTURES:
            for split in SPLITS[name]:
                self._stored[name, split] = Ragged(folder / "patches" / name / split)

    @property
    def num_bf16_clips(self) -> int:
        return len(self._stored["sounds", IN_BF16])

    def __getitem__(self, item: Item) -> Tensor:
        """Codes [codes, C] int64, or patches [P, D] float32."""
        stored = self._stored[item.name, item.split][item.index]
        return torch.from_numpy(stored.astype("int64" if item.is_sound else "float32"))


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of all sequences, padding included."""

    examples: Sequence[Example]
    ids: Tensor  # [T]
    positions: Tensor  # [T]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]  # first row of each sequence
    patches: Tensor | None  # [P, D] of all pictures
    codes: Tensor | None  # [codes, C] of all sounds
    code_lengths: tuple[int, ...]
    row_sources: Tensor  # [M] rows of pictures, then of sounds
    row_targets: Tensor  # [M] where they go

    @classmethod
    def of(cls, examples: Sequence[Example], encoded: Encoded) -> "Batch":
        lengths = tuple(-(-len(e.ids) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE for e in examples)
        starts = tuple(accumulate(lengths, initial=0))[:-1]
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        for example, start in zip(examples, starts, strict=True):
            ids[start : start + len(example.ids)] = torch.tensor(example.ids)
        loaded = {item: encoded[item] for e in examples for item in e.items}
        pictures = [item for item in loaded if not item.is_sound]
        sounds = [item for item in loaded if item.is_sound]
        first_rows, count = {}, 0
        for item in (*pictures, *sounds):
            first_rows[item] = count
            count += -(-len(loaded[item]) // 4)  # patches of a unit, codes of a group
        sources, targets = [], []
        for example, start in zip(examples, starts, strict=True):
            for span in example.spans:
                first = first_rows[example.items[span.item_index]] + span.row_offset
                sources.append(torch.arange(first, first + span.length))
                offset = start + span.prompt_offset
                targets.append(torch.arange(offset, offset + span.length))
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(
            examples=examples,
            ids=ids,
            positions=torch.cat([torch.arange(length) for length in lengths]),
            lengths=lengths,
            starts=starts,
            patches=torch.cat([loaded[item] for item in pictures]) if pictures else None,
            codes=torch.cat([loaded[item] for item in sounds]) if sounds else None,
            code_lengths=tuple(len(loaded[item]) for item in sounds),
            row_sources=torch.cat([nothing, *sources]),
            row_targets=torch.cat([nothing, *targets]),
        )

    @property
    def is_real(self) -> Tensor:
        """Which rows are no padding. [T] bool."""
        pairs = zip(self.examples, self.lengths, strict=True)
        return torch.cat([torch.arange(length) < len(e.ids) for e, length in pairs])

    @property
    def attend(self) -> FullSequences:
        return FullSequences(self.lengths)

    def embed(self, networks: Networks) -> Tensor:
        """Embedded tokens with the encoders' rows in their places. -> [T, D]."""
        x = networks.decoder.embed(self.ids)
        rows = []
        if self.patches is not None:
            rows.append(networks.tower.merger(self.patches))
        if self.codes is not None:
            rows.append(networks.embedder(self.codes, self.code_lengths))
        if not rows:
            return x
        return merge_embeddings(x, torch.cat(rows)[self.row_sources], self.row_targets)

    def answers(self, depth: int) -> "Answers":
        """Rows that predict tokens of the answers, ``depth`` tokens further on than the next."""
        rows, targets, owners = [], [], []
        for number, (example, start) in enumerate(zip(self.examples, self.starts, strict=True)):
            first = max(example.start - 1 - depth, 0)
            predicted = range(first + 1 + depth, len(example.ids))
            rows.append(torch.arange(start + first, start + first + len(predicted)))
            targets.append(torch.tensor(example.ids[first + 1 + depth :]))
            owners.append(torch.full((len(predicted),), number))
        return Answers(torch.cat(rows), torch.cat(targets), torch.cat(owners))

    def tokens_after(self, x: Tensor, depth: int) -> Tensor:
        """Embeddings of the tokens at positions + 1 + depth, as MTP block ``depth`` reads them.

        x: [T, D] -> [T, D]. Rows whose token would lie past the sequence hold zeros; no answer is
        predicted from them.
        """
        parts = []
        for sequence in x.split(self.lengths):
            missing = x.new_zeros(1 + depth, x.shape[1])
            parts.append(torch.cat([sequence[1 + depth :], missing]))
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Answers:
    """Which rows predict which tokens, and of which example."""

    rows: Tensor  # [A]
    targets: Tensor  # [A]
    owners: Tensor  # [A]

    def weights(self) -> Tensor:
        """A long answer counts for more than a short one, but not by its length. [A], mean 1."""
        lengths = torch.bincount(self.owners).float()
        weights = lengths[self.owners].rsqrt()
        return weights / weights.mean()
