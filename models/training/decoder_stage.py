"""Stage B: the language model and the last layers of the encoders, on everything at once.

The tower and the tokenizer are frozen, so their output is read from disk. A short text-only phase
before the joint one teaches copying while no other skill can be forgotten.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.training.batch import Batch, Encoded
from models.training.draw import stream
from models.training.examples import Examples
from models.training.networks import Networks
from models.training.optimizer import Optimizer, schedule
from models.training.parallel import Ranks
from models.training.settings import Recipe
from models.training.skills import MIX, TEXT_MIX
from models.training.state import load_modules, module_state, part
from services.llm.model.moe import Gate

_ADAM_LR = 2e-3
_HOLD = 0.4
_WARM_UP = 40
_TEXT_SHARE = 0.8  # of the learning rates, in the text phase
_BALANCE_STEP = 0.003
_ROW_RMS = 0.7  # of the encoders' rows before training; embedded text has 0.5


class DecoderStage:
    name = "decoder"

    def __init__(
        self,
        networks: Networks,
        examples: Examples,
        encoded: Encoded,
        recipe: Recipe,
        seed: int,
        ranks: Ranks,
    ) -> None:
        self.steps = recipe.text_steps + recipe.decoder_steps
        self._networks, self._examples, self._encoded = networks, examples, encoded
        self._recipe, self._seed, self._ranks = recipe, seed, ranks
        self._modules: dict[str, nn.Module] = {
            "decoder": networks.decoder,
            "embedder": networks.embedder,
            "merger": networks.tower.merger,
        }
        named = [
            (f"{prefix}.{name}", parameter)
            for prefix, module in self._modules.items()
            for name, parameter in module.named_parameters()
        ]
        self._optimizer = Optimizer(named, ranks, muon_lr=recipe.decoder_lr, adam_lr=_ADAM_LR)
        self._router = Router(networks.decoder)
        self._spell_codes()
        self._fit_projections()

    def step(self, index: int) -> dict[str, float]:
        rng = stream(self._seed, self.name, index, self._ranks.rank)
        text_only = index < self._recipe.text_steps
        mix = TEXT_MIX if text_only else MIX
        drawn = [self._examples.train(rng, mix) for _ in range(self._recipe.decoder_batch)]
        # Neighbours of one length share an attention call.
        batch = Batch.of(sorted(drawn, key=lambda e: len(e.ids)), self._encoded)
        self._router.count(batch.is_real)
        loss = answer_loss(self._networks, batch)
        loss.backward()
        self._optimizer.step(self._scale(index))
        return {"loss": loss.item(), "experts": self._router.balance(self._ranks)}

    def _scale(self, index: int) -> float:
        """Share of the learning rates. The joint phase warms up again: its gradients are new."""
        joint = index - self._recipe.text_steps
        if joint < 0:
            return _TEXT_SHARE * min(1.0, (index + 1) / _WARM_UP)
        return schedule(joint, self._recipe.decoder_steps, hold=_HOLD, warm_up=_WARM_UP)

    def state(self) -> dict[str, Tensor]:
        optimizer = {f"optimizer.{n}": t for n, t in self._optimizer.state().items()}
        return module_state(self._modules) | optimizer

    def load(self, state: Mapping[str, Tensor]) -> None:
        load_modules(self._modules, state)
        self._optimizer.load(part(state, "optimizer"))

    @torch.no_grad()
    def _spell_codes(self) -> None:
        """Begin with tables whose sum is the feature that the codes stand for."""
        codebooks = self._networks.tokenizer.quantizer.codebooks
        tables = self._networks.embedder.speech_embeddings
        for table, codebook in zip(tables.children(), codebooks, strict=False):
            assert isinstance(table, nn.Embedding)
            table.weight[: len(codebook)] = codebook

    @torch.no_grad()
    def _fit_projections(self) -> None:
        """Scale the last matrices into the language model so that rows begin at a fair size.

        There is no norm behind them, and AdamW moves them slowly.
        """
        rng = stream(self._seed, "projections")
        drawn = [self._examples.train(rng, {"shapes": 1, "speech": 1}) for _ in range(64)]
        batch = Batch.of(drawn, self._encoded)
        networks = self._networks
        pictures = networks.tower.merger(batch.patches)
        sounds = networks.embedder(batch.codes, batch.code_lengths)
        for module, rows in ((networks.tower.merger, pictures), (networks.embedder, sounds)):
            *_, last = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
            last.weight.mul_(_ROW_RMS / rows.square().mean().sqrt())


def answer_loss(networks: Networks, batch: Batch) -> Tensor:
    """Weighted cross-entropy of the answers' tokens."""
    hidden = networks.decoder(batch.embed(networks), batch.positions, batch.attend)  # [T, D]
    answers = batch.answers(depth=0)
    losses = F.cross_entropy(
        networks.decoder.logits(hidden[answers.rows]), answers.targets, reduction="none"
    )
    return (losses * answers.weights()).mean()


class Router:
    """Keeps experts busy: after each step a gate's bias moves towards those that were chosen less
    (auxiliary-loss-free balancing, Wang et al., 2024)."""

    def __init__(self, module: nn.Module) -> None:
        self._gates = [gate for gate in module.modules() if isinstance(gate, Gate)]
        self._loads = [torch.zeros(len(gate.weight)) for gate in self._gates]
        self._counted = torch.zeros(0, dtype=torch.bool)
        for gate, load in zip(self._gates, self._loads, strict=True):
            gate.register_forward_hook(partial(self._count, load))

    def count(self, rows: Tensor) -> None:
        """Count the choices of these rows of the next forward pass. rows: [T] bool."""
        self._counted = rows

    def _count(self, load: Tensor, gate: nn.Module, _: Any, chosen: tuple[Tensor, Tensor]) -> None:
        if len(chosen[0]) == len(self._counted):
            rows = chosen[0][self._counted]
            load.add_(torch.bincount(rows.flatten(), minlength=len(load)))

    @torch.no_grad()
    def balance(self, ranks: Ranks) -> float:
        """Move the biases. Returns the busiest expert's load as a multiple of the mean."""
        ranks.sum(self._loads, torch.float32)
        worst = 0.0
        for gate, load in zip(self._gates, self._loads, strict=True):
            assert gate.e_score_correction_bias is not None
            gate.e_score_correction_bias += _BALANCE_STEP * (load.mean() - load).sign()
            worst = max(worst, float(load.max() / load.mean()))
            load.zero_()
        return worst
