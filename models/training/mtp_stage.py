"""Stage C: the blocks that draft. The language model is finished and stays as it is."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from models.training.batch import Batch, Encoded
from models.training.draw import stream
from models.training.examples import Examples
from models.training.networks import Networks
from models.training.optimizer import Optimizer, schedule
from models.training.parallel import Ranks
from models.training.settings import Recipe
from models.training.skills import MIX
from models.training.state import load_modules, module_state, part

_ADAM_LR = 2e-3
_HOLD = 0.3


class MtpStage:
    name = "mtp"

    def __init__(
        self,
        networks: Networks,
        examples: Examples,
        encoded: Encoded,
        recipe: Recipe,
        seed: int,
        ranks: Ranks,
    ) -> None:
        self.steps = recipe.mtp_steps
        self._networks, self._examples, self._encoded = networks, examples, encoded
        self._recipe, self._seed, self._ranks = recipe, seed, ranks
        self._optimizer = Optimizer(
            networks.mtp.named_parameters(), ranks, muon_lr=recipe.decoder_lr, adam_lr=_ADAM_LR
        )

    def step(self, index: int) -> dict[str, float]:
        rng = stream(self._seed, self.name, index, self._ranks.rank)
        drawn = [self._examples.train(rng, MIX) for _ in range(self._recipe.decoder_batch)]
        batch = Batch.of(sorted(drawn, key=lambda e: len(e.ids)), self._encoded)
        losses = draft_losses(self._networks, batch)
        torch.stack(losses).sum().backward()
        self._optimizer.step(schedule(index, self.steps, hold=_HOLD))
        return {f"draft {n + 1}": loss.item() for n, loss in enumerate(losses)}

    def state(self) -> dict[str, Tensor]:
        optimizer = {f"optimizer.{n}": t for n, t in self._optimizer.state().items()}
        return module_state({"mtp": self._networks.mtp}) | optimizer

    def load(self, state: Mapping[str, Tensor]) -> None:
        load_modules({"mtp": self._networks.mtp}, state)
        self._optimizer.load(part(state, "optimizer"))


def draft_losses(networks: Networks, batch: Batch) -> list[Tensor]:
    """Weighted cross-entropy of the answers' tokens, for each block."""
    with torch.no_grad():
        x = batch.embed(networks)  # [T, D]
        hidden = networks.decoder(x, batch.positions, batch.attend)  # [T, D]
    losses = []
    for depth in range(len(networks.mtp.layers)):
        drafted = networks.mtp.layer(
            depth, batch.tokens_after(x, depth), hidden, batch.positions, batch.attend
        )
        answers = batch.answers(depth + 1)
        logits = networks.decoder.logits(drafted[answers.rows])
        each = F.cross_entropy(logits, answers.targets, reduction="none")
        losses.append((each * answers.weights()).mean())
    return losses
