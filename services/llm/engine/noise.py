"""Noise that depends on where a token is, and on nothing else.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is a keyed
bijection of counters: the key is the seed, the counter names vocabulary entry, output position and
choice. The same request therefore meets the same noise alone or in a batch, with or without drafts,
before and after a preemption, on this replica or the next.
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def gumbel(seeds: list[int], choices: list[int], positions: list[int], like: Tensor) -> Tensor:
    """Standard Gumbel noise for ``like``'s rows. like: [R, V] -> [R, V] float64.

    One seed (64 bits), choice and output position for each row.
    """
    size, device = like.shape[-1], like.device
    entry = torch.arange(-(-size // 4), device=device)  # four numbers per counter
    words = philox(
        (
            entry[None],
            _column(positions, device),
            _column(choices, device),
            torch.zeros(1, 1, dtype=torch.int64, device=device),
        ),
        (
            _column([seed & _MASK for seed in seeds], device),
            _column([seed >> 32 for seed in seeds], device),
        ),
    )  # 4 x [R, V / 4]
    bits = torch.stack(words, dim=-1).flatten(1)[:, :size]  # [R, V]
    uniform = (bits.double() + 0.5) * 2.0**-32  # in (0, 1), both ends excluded
    return -torch.log(-torch.log(uniform))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Ten rounds over four 32-bit counter words and two key words, all held in int64 tensors."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low half of a 32 x 32 bit product. int64 wraps, which leaves its bits right."""
    product = x * factor
    return product >> 32 & _MASK, product & _MASK


def _column(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)[:, None]
