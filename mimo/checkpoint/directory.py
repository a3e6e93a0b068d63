"""Which model directory a process uses."""

from pathlib import Path

from mimo.errors import CheckpointError

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "mimo-tiny"


def model_directory(given: str) -> Path:
    """The directory given with ``--model``, else the model bundled with a checkout.

    Raises CheckpointError that says what to do when there is neither.
    """
    directory = Path(given) if given else BUNDLED
    if (directory / "config.json").is_file():
        return directory
    if given:
        raise CheckpointError(f"--model: {given} is not a model directory (it has no config.json)")
    raise CheckpointError(
        "no model: give a checkpoint directory with --model or MIMO_MODEL; the bundled one, which"
        f" a checkout has, is not in {BUNDLED}"
    )
