"""The command line, `fold-attention`. Its dependencies are the package's extra `cli`."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. The exit status: 0, 1 for what cannot be honoured (one line says why), 2 for bad usage."""
    try:
        from fold_attention.cli.app import app
    except ModuleNotFoundError as error:
        print(f"fold-attention: needs {error.name}; pip install 'fold-attention[cli]'", file=sys.stderr)
        return 1
    try:
        app(None if arguments is None else list(arguments), prog_name="fold-attention")
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except (ValueError, TypeError, OSError) as error:
        print(f"fold-attention: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
