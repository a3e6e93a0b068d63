"""Processes that train together: one thread each, gradients averaged over gloo.

On two cores this beats one process with two threads by far: operations of this size spend more time
waking a second thread than they win by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, rank: int, size: int, meeting_point: Path) -> "Ranks":
        """Meet the other processes through a file that does not exist yet."""
        if size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=size
            )
        return cls(rank, size)

    def share(self, count: int) -> slice:
        """This rank's part of ``count`` equal pieces of work."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, tensors: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        """Add the ranks' tensors up, in place and on all of them alike. They travel as ``dtype``:
        gradients and updates can be rounded."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors]).to(dtype)
        dist.all_reduce(flat)
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, total in zip(tensors, flat.float().split(sizes), strict=True):
            tensor.copy_(total.view_as(tensor))

    def mean_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients over the ranks. A parameter without one counts as zero."""
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.sum(gradients)
        if self.size > 1:
            torch._foreach_div_(gradients, float(self.size))


ALONE = Ranks()
