"""`fold-attention show-config`: what is installed and what it runs on."""

from typing import Annotated

import typer
from rich.markdown import Markdown

import fold_attention
from fold_attention import _lib
from fold_attention.cli import options, report
from fold_attention.support import support_table, supports


def show_config(
    json: options.Json = None, table: Annotated[bool, typer.Option(help="Show what is supported.")] = True
) -> None:
    """Show the version, the library, its backends, this processor and what is supported.

    Works without a GPU and without a compiler.
    """
    about = report.provenance()
    backends = {device: supports("cache", device=device) for device in ("cpu", "cuda")}
    lines = {
        "fold-attention": about["fold_attention"] + (f" ({about['source']})" if about["source"] else ""),
        "library": str(_lib.path),
        "package": str(fold_attention.__path__[-1]),
        "backends": ", ".join(f"{name}: {'yes' if yes else reason}" for name, (yes, reason) in backends.items()),
        "processor": about["cpu"],
        "instruction set": about["isa"],
        "threads": str(about["threads"]),
        "torch": f"{about['torch']} ({about['torch_isa']}, {about['torch_threads']} threads)",
        "python": about["python"],
        "system": about["system"],
    }
    if json:
        backend_reasons = {name: reason for name, (_, reason) in backends.items()}
        report.write_json(json, about | {"library": lines["library"], "unsupported_backends": backend_reasons})
    console = report.console()
    width = max(map(len, lines))
    for name, value in lines.items():
        console.print(f"{name:{width}}  {value}", markup=False, soft_wrap=True)
    if table:
        console.print(Markdown(support_table()))
