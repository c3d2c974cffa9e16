"""The commands of `fold-attention`."""

from typing import Any

import typer

from fold_attention.cli.bench_decode import decode
from fold_attention.cli.bench_training import backward, forward
from fold_attention.cli.capture import capture
from fold_attention.cli.demo import demo
from fold_attention.cli.show_config import show_config

OPTIONS: dict[str, Any] = {
    "rich_markup_mode": "markdown",
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}

app = typer.Typer(
    help="Attention with a declared softmax reference: the same bits however it is scheduled, and each cached key read "
    "only as deeply as its weight deserves.",
    **OPTIONS,
)
bench = typer.Typer(help="Time an operation beside torch, in one run.", **OPTIONS)
bench.command()(decode)
bench.command()(forward)
bench.command()(backward)

app.command()(demo)
app.add_typer(bench, name="bench")
app.command()(capture)
app.command()(show_config)
