"""`mimo`: one verb per command; each lives in the module of its name."""

import typer

from mimo.cli import bench, chat, demo, eval, store, up

app = typer.Typer(
    name="mimo",
    help="Serve MiMo-V2 models split by modality, and talk to them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("eval")(eval.evaluate)
app.add_typer(store.app, name="store")


def main() -> None:
    """Entry point of the console script."""
    app()
