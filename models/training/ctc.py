"""Connectionist temporal classification (Graves et al., 2006) over ragged sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

BLANK = 0  # symbols count from 1


def ctc_loss(logits: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> Tensor:
    """Mean over sequences. logits: [T, 1 + symbols] each."""
    log_probs = pad_sequence([x.float().log_softmax(dim=-1) for x in logits])  # [T, B, 1 + S]
    flat = torch.tensor([symbol + 1 for target in targets for symbol in target])
    return F.ctc_loss(
        log_probs,
        flat,
        torch.tensor([len(x) for x in logits]),
        torch.tensor([len(target) for target in targets]),
        blank=BLANK,
        zero_infinity=True,
    )


def ctc_decode(logits: Tensor) -> list[int]:
    """The symbols of the best path: repetitions merged, blanks dropped. logits: [T, 1 + S]."""
    best = logits.argmax(dim=-1).unique_consecutive().tolist()
    return [symbol - 1 for symbol in best if symbol != BLANK]
