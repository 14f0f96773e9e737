"""The `locks` command."""

from __future__ import annotations

import contextlib
import os
import sys

import typer

from locks.commands import CommandError
from locks.commands.bench import app as bench
from locks.commands.capture import EXAMPLES as CAPTURE_EXAMPLES
from locks.commands.capture import capture
from locks.commands.doctor import EXAMPLES as DOCTOR_EXAMPLES
from locks.commands.doctor import doctor
from locks.commands.eval import EXAMPLES as EVAL_EXAMPLES
from locks.commands.eval import evaluate
from locks.commands.formats import formats
from locks.commands.quality import EXAMPLES as QUALITY_EXAMPLES
from locks.commands.quality import quality
from locks.commands.serve import EXAMPLES as SERVE_EXAMPLES
from locks.commands.serve import serve
from locks.commands.version import version

_BAD_INPUT = 2
_INTERRUPTED = 130  # as a shell reports a command that SIGINT ended

app = typer.Typer(
    help="LOCKS: sparse attention in vLLM, which reads little of a long KV cache. Start with `locks doctor`, then"
    " `locks serve MODEL`; `locks COMMAND --help` has each command's options and examples.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # wraps the lines of a docstring anew; other modes keep their ends
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=SERVE_EXAMPLES, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command(epilog=QUALITY_EXAMPLES)(quality)
app.command(epilog=CAPTURE_EXAMPLES)(capture)
app.command("eval", epilog=EVAL_EXAMPLES)(evaluate)
app.command()(formats)
app.command(epilog=DOCTOR_EXAMPLES)(doctor)
app.command()(version)
app.add_typer(bench, name="bench")


def main() -> None:
    """Runs the command. What a user can put right ends in one line on stderr and exit code 2."""
    try:
        code = app(prog_name="locks", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk can still be reported
        sys.exit(code)
    except CommandError as error:
        _stop(str(error), _BAD_INPUT)
    except ImportError as error:
        _stop(str(error), _BAD_INPUT)
    except typer.Abort:
        _stop("interrupted", _INTERRUPTED)
    except (OSError, UnicodeEncodeError) as error:  # of stdout: commands report their own files
        _discard_stdout()
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # the reader has gone: nobody to tell
        _stop(f"the output cannot be written: {error}", _BAD_INPUT)
    except Exception as error:
        # Usage errors: typer's own class of them differs between its releases, their interface does not.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "locks"
        _stop(f"{error.format_message().rstrip('.')}; see `{command} --help`", _BAD_INPUT)


def _discard_stdout() -> None:
    """Lets what is still buffered go nowhere, or Python would fail on it once more at its exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _stop(message: str, code: int) -> None:
    print("locks: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
