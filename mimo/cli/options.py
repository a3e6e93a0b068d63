"""Options that several commands have: of the system that a command starts."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path | None,
    typer.Option(help="Model directory. Default: the bundled mimo-tiny.", envvar="MIMO_MODEL"),
]
Attention = Annotated[str, typer.Option(help="Attention backend: NAME, or COMPONENT=NAME,….")]
Dtype = Annotated[str, typer.Option(help="Compute dtype: float32 or bfloat16.")]
Threads = Annotated[
    int, typer.Option(min=0, help="CPU threads of each model service; 0: its own choice.")
]
