"""Linear maps of few rows."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mimo.nn.device import multiplies_bf16

FEW_ROWS = 32


class Linear(nn.Linear):
    """``nn.Linear``; a few bfloat16 rows on a CPU are multiplied as columns.

    The matrix product behind ``nn.Linear`` packs the weight for its kernel before it reads it,
    which for few rows costs as much as the product. On the left of a product a weight is read as it
    is: beside a vector everywhere, beside a matrix where the CPU multiplies bfloat16 matrices.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] -> [..., out_features]."""
        if input.dtype == torch.bfloat16 and self._are_few_rows(input):
            if len(input) == 1:
                return torch.mv(self.weight, input[0]).unsqueeze(0)
            if multiplies_bf16():
                return torch.mm(self.weight, input.t()).t().contiguous()
        return F.linear(input, self.weight, self.bias)

    def _are_few_rows(self, x: Tensor) -> bool:
        is_few = x.dim() == 2 and 1 <= x.shape[0] <= FEW_ROWS
        return is_few and x.device.type == "cpu" and self.bias is None
