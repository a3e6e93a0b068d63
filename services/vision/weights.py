"""The tower's tensors: found under any of the published prefixes and loaded strictly."""

import json
from collections.abc import Mapping

import torch

from mimo.checkpoint.index import CheckpointIndex
from mimo.checkpoint.loader import load
from mimo.errors import CheckpointError
from mimo.nn.attention import AttentionSelector
from mimo.nn.meta import without_weights
from services.vision.config import VisionTowerConfig
from services.vision.model import VisionTower

PREFIXES = ("visual.", "vision_model.", "model.visual.")

# Published towers have no bias here, but the model definition that came with them does.
MERGER_LAYERS = ("ln_q", "mlp.0", "mlp.2")


def read_tower_config(
    index: CheckpointIndex, overrides: Mapping[str, str] | None = None
) -> VisionTowerConfig:
    """The tower's configuration, from the model directory's two files. Raises CheckpointError."""
    path = index.directory / "preprocessor_config.json"
    try:
        preprocessor = json.loads(path.read_bytes()) if path.exists() else None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    return VisionTowerConfig.from_checkpoint(
        index.config, preprocessor=preprocessor, overrides=overrides
    )


def load_vision_tower(
    index: CheckpointIndex,
    config: VisionTowerConfig,
    *,
    dtype: torch.dtype,
    device: str,
    selector: AttentionSelector,
) -> VisionTower:
    """Build the tower and fill it from a checkpoint.

    Raises CheckpointError naming a tensor that is missing (a banded block's sinks too), unexpected
    or of another shape.
    """
    prefix = find_prefix(index)
    biases = [name for name in MERGER_LAYERS if f"{prefix}merger.{name}.bias" in index.tensors]
    with without_weights():
        tower = VisionTower(config, selector, dtype=dtype, device=device, merger_biases=biases)
    load(tower, index, (), prefix=prefix, dtype=dtype, device=device)
    return tower.eval().requires_grad_(False)


def find_prefix(index: CheckpointIndex) -> str:
    """What stands before the tower's names in this checkpoint. Raises CheckpointError."""
    found = [
        prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in index.tensors)
    ]
    if len(found) != 1:
        what = f"under each of {', '.join(found)}" if found else f"under {', '.join(PREFIXES)}"
        raise CheckpointError(f"expected one vision tower, found {len(found)} {what}")
    return found[0]
