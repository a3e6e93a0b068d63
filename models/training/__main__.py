"""Train the bundled model: ``python -m models.training COMMAND [--train-dir DIR] [...]``.

  data       make the data sets
  encoders   stage A: vision tower, audio tokenizer, codes (makes the data sets if need be)
  decoder    stage B: language model
  mtp        stage C: draft blocks
  all        all of these, with a gate after each stage, then export
  evaluate   measure what exists on held-out data
  prompts    write held-out questions with their pictures, sounds and videos as files
  export     write a checkpoint of what exists
  status     steps done of each stage

Every command resumes where the last one stopped; state is written every five minutes.
"""

import signal
import sys

import torch
from rich.console import Console

from mimo.config import parse
from mimo.errors import StartupError
from mimo.nn.heap import keep_freed_buffers
from models.training.pipeline import Pipeline
from models.training.settings import Settings

COMMANDS = ("data", "encoders", "decoder", "mtp", "all", "evaluate", "prompts", "export", "status")


def main() -> None:
    # Otherwise the training processes would outlive this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    command, *flags = sys.argv[1:] or [""]
    if command not in COMMANDS:
        console.print(__doc__)
        raise SystemExit(0 if command in ("-h", "--help") else 2)
    try:
        settings = parse(Settings, flags, program=f"python -m models.training {command}")
        run(command, settings, console)
    except StartupError as error:
        console.print(str(error))
        raise SystemExit(1) from None


def run(command: str, settings: Settings, console: Console) -> None:
    torch.set_num_threads(1)  # faster than two, for matrices of this size
    keep_freed_buffers(512 << 20)
    pipeline = Pipeline(settings, console)
    match command:
        case "data":
            pipeline.data()
        case "encoders":
            pipeline.encoders()
        case "decoder":
            pipeline.decoder()
        case "mtp":
            pipeline.mtp()
        case "evaluate":
            pipeline.evaluate()
        case "prompts":
            folder = pipeline.prompts()
            console.print(f"wrote {folder}")
        case "status":
            console.print(pipeline.status())
        case "all":
            pipeline.everything()
    if command in ("all", "export"):
        size = pipeline.export()
        console.print(f"wrote {settings.out} ({size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
