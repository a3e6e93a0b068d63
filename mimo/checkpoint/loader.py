"""Fill a module from a checkpoint, strictly: no tensor without a parameter, nor the reverse.

The module may be built under ``torch.device("meta")``; its parameters are assigned, not copied
into, so weights are in memory once. Shards are read one after the other.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mimo.checkpoint.index import CheckpointIndex, TensorInfo
from mimo.checkpoint.rules import Cast, Part, Rule, parts_of
from mimo.errors import CheckpointError

# What the loader reads; quantised dtypes need rules of their own.
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")

_MAX_LISTED = 5


def load(
    module: nn.Module,
    index: CheckpointIndex,
    rules: Sequence[Rule] = (),
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    ignore: Sequence[str] = (),
) -> None:
    """Load every tensor under ``prefix`` into ``module``.

    Names lose the prefix, then go through the rules. ``ignore`` are regular expressions searched in
    the name without the prefix. Floating-point tensors are cast to ``dtype`` (None keeps the stored
    dtype) unless a Cast says otherwise. Raises CheckpointError naming tensor, expected and found.
    """
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    plan = _plan(index, rules, prefix, ignore)
    _check(plan, expected, prefix)
    state: dict[str, Tensor] = {}
    for file, sources in _by_file(plan).items():
        with safe_open(file, framework="pt", device="cpu") as shard:
            for source in sources:
                tensor = shard.get_tensor(source.name)
                for part in source.parts:
                    target = _target_dtype(part.name, tensor.dtype, dtype, rules)
                    state[part.name] = _materialise(tensor, part).to(device, target)
    module.load_state_dict(state, assign=True)
    _finish(module, device)


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint tensor and the parameters it becomes."""

    name: str
    info: TensorInfo
    parts: tuple[Part, ...]


def _plan(
    index: CheckpointIndex, rules: Sequence[Rule], prefix: str, ignore: Sequence[str]
) -> list[_Source]:
    plan = []
    for name, info in index.select(prefix).items():
        local = name.removeprefix(prefix)
        if not any(re.search(pattern, local) for pattern in ignore):
            plan.append(_Source(name, info, parts_of(local, info.shape, rules)))
    return plan


def _check(plan: Sequence[_Source], expected: Mapping[str, tuple[int, ...]], prefix: str) -> None:
    found: dict[str, _Source] = {}
    problems: list[str] = []
    unexpected: list[str] = []
    for source in plan:
        if source.info.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            problems.append(
                f"tensor {source.name}: expected one of {known}, found dtype {source.info.dtype}"
            )
        for part in source.parts:
            if part.name in found:
                other = found[part.name].name
                problems.append(f"tensors {other} and {source.name} both become {part.name}")
            found[part.name] = source
            shape = part.shape(source.info.shape)
            if part.name not in expected:
                unexpected.append(f"{source.name} {list(source.info.shape)}")
            elif shape != expected[part.name]:
                problems.append(
                    f"tensor {source.name}: expected shape {list(expected[part.name])} for"
                    f" {part.name}, found {list(shape)}"
                )
    missing = [
        f"{prefix}{name} {list(shape)}" for name, shape in expected.items() if name not in found
    ]
    if missing:
        problems.append(f"expected but not found: {_listed(missing)}")
    if unexpected:
        problems.append(f"found but not expected: {_listed(unexpected)}")
    if problems:
        raise CheckpointError("; ".join(problems[:_MAX_LISTED]))


def _listed(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _by_file(plan: Sequence[_Source]) -> dict[Path, list[_Source]]:
    """Sources per shard in the order of their bytes, so that a disk reads forward."""
    files: dict[Path, list[_Source]] = defaultdict(list)
    for source in sorted(plan, key=lambda source: (source.info.file, source.info.offset)):
        files[source.info.file].append(source)
    return files


def _materialise(tensor: Tensor, part: Part) -> Tensor:
    """Memory of its own: the file is mapped, and its alignment would show in the last bits."""
    if part.columns is not None:
        tensor = tensor[:, part.columns[0] : part.columns[1]]
    if part.rows is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.cat([tensor[start:stop] for start, stop in part.rows])


def _target_dtype(
    name: str, stored: torch.dtype, wanted: torch.dtype | None, rules: Sequence[Rule]
) -> torch.dtype:
    if not stored.is_floating_point:
        return stored
    for rule in rules:
        if isinstance(rule, Cast) and re.search(rule.pattern, name):
            return stored if rule.dtype is None else _torch_dtype(rule.dtype)
    return stored if wanted is None else wanted


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def _finish(module: nn.Module, device: str | torch.device) -> None:
    """Move what is computed rather than loaded (non-persistent buffers) to the device."""
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise RuntimeError(f"buffer {name} is not loaded and was built on the meta device")
    module.to(device)
