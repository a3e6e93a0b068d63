"""Muon for matrices (Jordan et al., 2024), AdamW for everything else.

Muon steps along the nearest orthogonal matrix of the momentum, so that all directions of a matrix
learn equally fast and a step has the same size whatever the gradient's. That makes small models
learn several times faster, and it overwrites a pre-trained matrix within a few noisy steps: last
projections into the language model and everything that is not a matrix of a hidden layer take
AdamW.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from models.training.parallel import Ranks

MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.97)
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.01

_SMALLEST_SIDE = 32
_NO_MATRIX = re.compile(r"embed_tokens|speech_embeddings|lm_head|mlp\.gate\.weight|heads\.")
# There is no norm behind these, and rows ten times as large as text drown the decoder's layers.
_SLOW = re.compile(r"merger\.mlp\.2\.weight|projection\.mlp\.2\.weight")
_SLOW_SHARE = 0.1  # of AdamW's learning rate


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Nearly orthogonal matrices with the same row and column spaces. [N, R, C] -> same.

    Newton-Schulz iterations with coefficients that move all singular values into about 0.7..1.2.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices  # the smaller Gram matrix is the cheaper one
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) @ x
    return x.mT if is_tall else x


class Optimizer:
    """Both rules over named parameters. ``step`` also clears the gradients."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        ranks: Ranks,
        *,
        muon_lr: float,
        adam_lr: float,
    ) -> None:
        named = {name: p for name, p in parameters if p.requires_grad}
        self.parameters = list(named.values())
        self._ranks = ranks
        self._muon_lr, self._adam_lr = muon_lr, adam_lr
        self._matrices = {name: p for name, p in named.items() if is_matrix(name, p)}
        self._others = {name: p for name, p in named.items() if name not in self._matrices}
        self._momentum = {name: torch.zeros_like(p) for name, p in named.items()}
        self._square = {name: torch.zeros_like(p) for name, p in self._others.items()}
        self._step = 0

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update with both learning rates times ``scale``."""
        self._ranks.mean_gradients(self.parameters)
        self._step += 1
        for name, parameter in self._others.items():
            self._adam(name, parameter, scale)
        self._muon(scale)
        for parameter in self.parameters:
            parameter.grad = None

    def _adam(self, name: str, parameter: nn.Parameter, scale: float) -> None:
        assert parameter.grad is not None
        first, second = ADAM_BETAS
        momentum, square = self._momentum[name], self._square[name]
        momentum.lerp_(parameter.grad, 1 - first)
        square.lerp_(parameter.grad.square(), 1 - second)
        lr = self._adam_lr * scale * (_SLOW_SHARE if _SLOW.search(name) else 1.0)
        deviation = (square / (1 - second**self._step)).sqrt_().add_(ADAM_EPS)
        parameter.addcdiv_(momentum, deviation, value=-lr / (1 - first**self._step))

    def _muon(self, scale: float) -> None:
        """Matrices of one shape go together; each rank orthogonalises its share of them."""
        stacks: dict[torch.Size, list[str]] = {}
        for name, parameter in self._matrices.items():
            stacks.setdefault(_blocks(name, parameter).shape[1:], []).append(name)
        updates = []
        for names in stacks.values():
            stack = torch.cat([self._direction(name) for name in names])  # [N, R, C]
            mine = self._ranks.share(len(stack))
            update = torch.zeros_like(stack)
            update[mine] = orthogonalise(stack[mine])
            updates.append(update)
        self._ranks.sum(updates)
        for (rows, columns), names, update in zip(stacks, stacks.values(), updates, strict=True):
            lr = self._muon_lr * scale
            growth = max(1.0, rows / columns) ** 0.5
            sizes = [len(_blocks(name, self._matrices[name])) for name in names]
            for name, part in zip(names, update.split(sizes), strict=True):
                parameter = self._matrices[name]
                step = part.reshape(parameter.shape)
                parameter.mul_(1 - lr * WEIGHT_DECAY).add_(step, alpha=-lr * growth)

    def _direction(self, name: str) -> Tensor:
        """Nesterov momentum. -> [N, R, C]."""
        parameter = self._matrices[name]
        assert parameter.grad is not None
        momentum = self._momentum[name].lerp_(parameter.grad, 1 - MOMENTUM)
        return _blocks(name, parameter.grad.lerp(momentum, MOMENTUM))

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs."""
        return {
            "step": torch.tensor(self._step),
            **{f"momentum.{name}": tensor for name, tensor in self._momentum.items()},
            **{f"square.{name}": tensor for name, tensor in self._square.items()},
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._step = int(state["step"])
        for kind, tensors in (("momentum", self._momentum), ("square", self._square)):
            for name, tensor in tensors.items():
                tensor.copy_(state[f"{kind}.{name}"])


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a map between hidden layers, large enough for Muon."""
    if parameter.dim() < 2 or _NO_MATRIX.search(name) or _SLOW.search(name):
        return False
    return min(_blocks(name, parameter).shape[1:]) >= _SMALLEST_SIDE


def _blocks(name: str, tensor: Tensor) -> Tensor:
    """A parameter as the matrices it is made of: experts and their two halves apart, the kernel of
    a convolution flat. -> [N, R, C]."""
    if name.endswith("gate_up_proj"):
        return tensor.reshape(2 * len(tensor), -1, tensor.shape[-1])
    if name.endswith("down_proj"):
        return tensor
    return tensor.reshape(1, len(tensor), -1)


def schedule(step: int, steps: int, *, hold: float, warm_up: int = 40) -> float:
    """Share of the learning rate: up in ``warm_up`` steps, level, then linearly down to 0 over
    what follows the first ``hold`` of all steps."""
    rise = min(1.0, (step + 1) / min(warm_up, steps))
    return rise * min(1.0, (1 - step / steps) / (1 - hold))
