"""State of a training stage on disk: written whole or not at all, read without unpickling."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

SUFFIX = ".safetensors"


def write_state(path: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Views that share memory, as state dicts hold them, are not storable.
    own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    fresh = path.with_suffix(".new")
    fresh.write_bytes(save(own, metadata={"step": str(step)}))
    os.replace(fresh, path)


def read_state(path: Path) -> tuple[dict[str, Tensor], int]:
    """Tensors and the number of steps done. Raises FileNotFoundError."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()  # not a dict: only the method exists
        return {name: file.get_tensor(name) for name in names}, int(file.metadata()["step"])


def steps_done(path: Path) -> int:
    """0 when there is no state yet."""
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["step"])


def module_state(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """State dicts of several modules in one."""
    return {
        f"{prefix}.{name}": tensor
        for prefix, module in modules.items()
        for name, tensor in module.state_dict().items()
    }


@torch.no_grad()
def load_modules(modules: Mapping[str, nn.Module], state: Mapping[str, Tensor]) -> None:
    """Inverse of :func:`module_state`; other names in ``state`` are left alone."""
    for prefix, module in modules.items():
        module.load_state_dict(part(state, prefix))


def part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Entries under ``prefix.``, without it."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)
    }
