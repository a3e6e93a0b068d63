"""Muon and AdamW: steps against independent arithmetic."""

import torch
from torch import nn

from models.training.optimizer import (
    MOMENTUM,
    WEIGHT_DECAY,
    Optimizer,
    is_matrix,
    orthogonalise,
    schedule,
)
from models.training.parallel import ALONE, Ranks


def test_orthogonalise_keeps_the_spaces_and_evens_the_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((40, 40), (64, 32), (32, 96)):
        matrix = torch.randn(2, rows, columns, generator=generator)
        u, s, vh = torch.linalg.svd(orthogonalise(matrix), full_matrices=False)
        assert float(s.min()) > 0.2 and float(s.max()) < 1.3
        wanted, _, wanted_vh = torch.linalg.svd(matrix, full_matrices=False)
        # Newton-Schulz is a polynomial of the matrix: the polar factor's direction remains.
        polar = wanted @ wanted_vh
        cosine = (orthogonalise(matrix) * polar).sum() / polar.square().sum()
        assert 0.75 < float(cosine) < 1.2


def test_a_muon_step_is_the_scaled_orthogonal_direction() -> None:
    weight = nn.Parameter(torch.randn(64, 32, generator=torch.Generator().manual_seed(1)))
    before, gradient = weight.detach().clone(), torch.randn_like(weight)
    optimizer = Optimizer([("w", weight)], ALONE, muon_lr=0.1, adam_lr=1.0)
    weight.grad = gradient.clone()
    optimizer.step(0.5)
    momentum = (1 - MOMENTUM) * gradient
    direction = (1 - MOMENTUM) * gradient + MOMENTUM * momentum
    step = orthogonalise(direction[None])[0] * (64 / 32) ** 0.5
    expected = before * (1 - 0.05 * WEIGHT_DECAY) - 0.05 * step
    torch.testing.assert_close(weight.detach(), expected)
    assert weight.grad is None


def test_experts_and_their_halves_are_orthogonalised_apart() -> None:
    stack = nn.Parameter(torch.zeros(2, 64, 32))
    optimizer = Optimizer([("mlp.gate_up_proj", stack)], ALONE, muon_lr=1.0, adam_lr=1.0)
    gradient = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(2))
    stack.grad = gradient.clone()
    optimizer.step(1.0)
    for expert in range(2):
        for half in (slice(0, 32), slice(32, 64)):
            sizes = torch.linalg.svdvals(stack.detach()[expert, half])
            assert float(sizes.min()) > 0.2 and float(sizes.max()) < 1.3


def test_adam_agrees_with_torch() -> None:
    values = torch.randn(10, generator=torch.Generator().manual_seed(3))
    ours, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    optimizer = Optimizer([("bias", ours)], ALONE, muon_lr=1.0, adam_lr=0.01)
    reference = torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.97))
    for step in range(5):
        gradient = torch.randn(10, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step(1.0)
        reference.step()
    torch.testing.assert_close(ours, theirs)


def test_embeddings_heads_routers_and_last_projections_are_no_matrices() -> None:
    weight = torch.zeros(64, 64)
    for name in (
        "decoder.model.embed_tokens.weight",
        "decoder.lm_head.weight",
        "decoder.model.layers.1.mlp.gate.weight",
        "embedder.speech_embeddings.0.weight",
        "merger.mlp.2.weight",
        "embedder.projection.mlp.2.weight",
        "heads.letters.weight",
    ):
        assert not is_matrix(name, weight), name
    assert is_matrix("decoder.model.layers.1.mlp.gate_proj.weight", weight)
    assert is_matrix("tower.merger.mlp.0.weight", weight)


def test_work_is_dealt_out_once() -> None:
    for size in (1, 2, 3):
        shares = [range(10)[Ranks(rank, size).share(10)] for rank in range(size)]
        assert [i for share in shares for i in share] == list(range(10))


def test_the_schedule_rises_holds_and_ends_at_nothing() -> None:
    values = [schedule(step, 100, hold=0.5, warm_up=10) for step in range(101)]
    assert values[0] == 0.1 and values[9:51] == [1.0] * 42 and values[100] == 0.0
    assert values[50:] == sorted(values[50:], reverse=True)
