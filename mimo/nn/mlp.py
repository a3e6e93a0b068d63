"""The gated feed-forward layer of every tower (Shazeer, 2020)."""

from torch import Tensor, nn
from torch.nn import functional as F

from mimo.nn.linear import Linear


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``. x: [..., D] -> [..., D]."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, bias=bias)
        self.up_proj = Linear(hidden, intermediate, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
