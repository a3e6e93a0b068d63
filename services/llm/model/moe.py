"""Mixture of experts: sigmoid gate, top-k routed experts, nothing shared."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mimo.nn.linear import PackedWeight, Packing
from mimo.nn.panels import Panels
from services.llm.model.config import DecoderConfig
from services.llm.model.expert_panels import ExpertPanels

# On an accelerator, up to so many (token, expert) pairs are computed without asking the host which
# experts were chosen: their weights are gathered and multiplied in one batch. On a CPU the host
# knows for free, and the gather costs more than the products.
GATHER_MAX_PAIRS = 32


class SparseMoe(nn.Module):
    """The feed-forward of a sparse layer."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.gate = Gate(config, dtype=torch.promote_types(torch.float32, dtype))
        self.experts = Experts(
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            std=config.initializer_range,
            gather_max_pairs=0 if torch.device(device).type == "cpu" else GATHER_MAX_PAIRS,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D] -> [T, D]."""
        topk_ids, topk_weights = self.gate(x)
        return self.experts(x, topk_ids, topk_weights)


class Gate(nn.Module):
    """Chooses the experts of a token by biased score and weighs them by the unbiased one.

    Scores are float32 whatever the model's dtype is: two experts that bfloat16 cannot tell apart
    are a different answer.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        num_experts = config.n_routed_experts
        self.topk = config.num_experts_per_tok
        self.num_groups = config.n_group
        self.topk_groups = config.topk_group
        self.normalize = config.norm_topk_prob
        self.scaling_factor = config.routed_scaling_factor
        self.operand_dtype = getattr(torch, config.moe_router_dtype)
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, dtype=dtype))
        nn.init.normal_(self.weight, std=config.initializer_range)
        bias = torch.zeros(num_experts, dtype=dtype) if config.has_correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)  # balanced, not trained by gradient

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, D] -> expert ids [T, topk] in order of choice, their float32 weights [T, topk]."""
        scores = torch.sigmoid(self._logits(x))  # [T, E]
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias
        if self.num_groups > 1:
            choice = self._best_groups(choice)
        # A stable sort, unlike topk, promises that the lowest index wins a tie.
        topk_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : self.topk]
        weights = scores.gather(-1, topk_ids)  # [T, topk]
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if self.scaling_factor != 1.0:
            weights = weights * self.scaling_factor
        return topk_ids, weights

    def _logits(self, x: Tensor) -> Tensor:
        """Operands rounded to the gate's dtype, accumulation and result in float32 or wider."""
        wide = torch.promote_types(torch.float32, x.dtype)
        if self.operand_dtype == torch.float32:
            return F.linear(x.to(wide), self.weight.to(wide))
        x, weight = x.to(self.operand_dtype), self.weight.to(self.operand_dtype)
        return F.linear(x.to(wide), weight.to(wide))

    def _best_groups(self, choice: Tensor) -> Tensor:
        """Leave only the experts of the best groups; a group is worth its two best. [T, E]."""
        groups = choice.unflatten(-1, (self.num_groups, -1))  # [T, groups, E / groups]
        worth = groups.topk(2, dim=-1).values.sum(dim=-1)  # [T, groups]
        order = worth.sort(dim=-1, descending=True, stable=True).indices
        dropped = torch.ones_like(worth, dtype=torch.bool)
        dropped = dropped.scatter(-1, order[:, : self.topk_groups], False)
        return groups.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)


class Experts(nn.Module):
    """All experts of a layer, stacked. gate_up_proj holds the gate's rows, then the up rows.

    A state dict holds every expert's gate_proj, up_proj and down_proj apart. Once packed, for
    inference alone, there are no stacks.
    """

    _panels: ExpertPanels | None = None
    _packed: tuple[list[PackedWeight], list[PackedWeight]] | None = None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        std: float,
        gather_max_pairs: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.gather_max_pairs = gather_max_pairs
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype)
        )
        self.down_proj = nn.Parameter(
            torch.empty(num_experts, hidden_size, intermediate_size, dtype=dtype)
        )
        nn.init.normal_(self.gate_up_proj, std=std)
        nn.init.normal_(self.down_proj, std=std)
        self.register_state_dict_post_hook(_split_experts)
        self.register_load_state_dict_pre_hook(_join_experts)

    def pack(self, packing: Packing) -> None:
        """Pack the weights of all experts in place of the stacks."""
        if packing is Panels:
            self._panels = ExpertPanels(self.gate_up_proj, self.down_proj)
        else:
            self._packed = [*map(packing, self.gate_up_proj)], [*map(packing, self.down_proj)]
        del self.gate_up_proj, self.down_proj

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x: [T, D], topk_ids and topk_weights: [T, k] -> [T, D], the weighted sum of experts."""
        if self._panels is not None:
            return self._panels(x, topk_ids, topk_weights)
        if topk_ids.numel() <= self.gather_max_pairs:
            out = self._gathered(x, topk_ids)
        else:
            out = self._grouped(x, topk_ids)  # [T, k, D]
        out = torch.bmm(topk_weights.unsqueeze(1), out.to(topk_weights.dtype))  # [T, 1, D]
        return out.squeeze(1).to(x.dtype)

    def _gathered(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """One matrix-vector product for each pair, as one batch. -> [T, k, D]."""
        pairs = topk_ids.flatten()  # [T * k]
        rows = x.repeat_interleave(topk_ids.shape[1], dim=0).unsqueeze(-1)  # [T * k, D, 1]
        hidden = torch.bmm(self.gate_up_proj[pairs], rows).squeeze(-1)  # [T * k, 2I]
        out = torch.bmm(self.down_proj[pairs], _swiglu(hidden).unsqueeze(-1))  # [T * k, D, 1]
        return out.view(*topk_ids.shape, -1)

    def _grouped(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Two matrix products for each expert that was chosen at all. -> [T, k, D]."""
        pairs = topk_ids.flatten()  # [T * k]
        order = pairs.argsort(stable=True)  # by expert
        counts = torch.bincount(pairs, minlength=self.num_experts).tolist()
        gate_ups, downs = self._packed or (self.gate_up_proj, self.down_proj)
        rows = x.index_select(0, order // topk_ids.shape[1])  # [T * k, D]
        hidden = _swiglu(_by_expert(rows, counts, gate_ups))  # [T * k, I]
        outs = _by_expert(hidden, counts, downs)  # [T * k, D]
        return outs.index_select(0, order.argsort()).view(*topk_ids.shape, -1)


def _by_expert(x: Tensor, counts: list[int], weights: Iterable[Tensor | PackedWeight]) -> Tensor:
    """x: [P, in], the first counts[0] rows for the first weight, and so on -> [P, out]."""
    parts = zip(x.split(counts), counts, weights, strict=True)
    return torch.cat([_product(part, weight) for part, count, weight in parts if count])


def _product(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    return F.linear(x, weight) if isinstance(weight, Tensor) else weight.product(x)


def _swiglu(hidden: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]."""
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


def _split_experts(experts: Experts, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    gate_up, down = state.pop(f"{prefix}gate_up_proj"), state.pop(f"{prefix}down_proj")
    for expert, (gate_up_rows, down_rows) in enumerate(zip(gate_up, down, strict=True)):
        parts = (*gate_up_rows.chunk(2), down_rows)  # views
        state.update(zip(_expert_names(prefix, expert), parts, strict=True))


def _join_experts(experts: Experts, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    names = [_expert_names(prefix, expert) for expert in range(experts.num_experts)]
    if all(name in state for expert_names in names for name in expert_names):
        parts = [[state.pop(name) for name in expert_names] for expert_names in names]
        state[f"{prefix}gate_up_proj"] = torch.stack(
            [torch.cat((gate, up)) for gate, up, _ in parts]
        )
        state[f"{prefix}down_proj"] = torch.stack([down for _, _, down in parts])


def _expert_names(prefix: str, expert: int) -> list[str]:
    return [f"{prefix}{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
