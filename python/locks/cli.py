"""The `locks` command."""

from __future__ import annotations

import sys

import typer

from locks.commands import CommandError
from locks.commands.formats import formats
from locks.commands.quality import quality
from locks.commands.version import version

_BAD_INPUT = 2
_INTERRUPTED = 130  # as a shell reports a command that SIGINT ended

app = typer.Typer(
    help="LOCKS: page summaries for reading little of a long KV cache.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(quality)
app.command()(formats)
app.command()(version)


def main() -> None:
    """Runs the command. What a user can put right ends in one line on stderr and exit code 2."""
    try:
        sys.exit(app(prog_name="locks", standalone_mode=False))
    except CommandError as error:
        _stop(str(error), _BAD_INPUT)
    except ImportError as error:
        _stop(str(error), _BAD_INPUT)
    except typer.Abort:
        _stop("interrupted", _INTERRUPTED)
    except Exception as error:
        # Usage errors: typer's own class of them differs between its releases, their interface does not.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "locks"
        _stop(f"{error.format_message().rstrip('.')}; see `{command} --help`", _BAD_INPUT)


def _stop(message: str, code: int) -> None:
    print("locks: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
