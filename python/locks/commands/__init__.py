"""The commands of `locks`, one module each; locks.cli lists them. Modules that load torch are imported when a
command runs, so that `--help` answers at once."""

import json
from typing import Any

# What json.loads raises: text that is nested too deep is no ValueError.
NOT_JSON = (ValueError, RecursionError)


class CommandError(Exception):
    """What a user can put right: one line that names the value, what is allowed and, after it, the next step."""


def usage_error(command: str, reason: object) -> CommandError:
    """A value that was given and cannot be taken: names the page of help."""
    return CommandError(f"{reason}; see `{command} --help`")


def json_object(command: str, option: str, text: str) -> dict[str, Any]:
    """The JSON object that an option holds. Raises CommandError."""
    try:
        value = json.loads(text, object_pairs_hook=_named_once)
    except NOT_JSON as error:
        raise usage_error(command, f"{option} = {_short(text)}: {error}") from None
    if not isinstance(value, dict):
        raise usage_error(command, f"{option} = {_short(text)}, expected a JSON object")
    return value


def locks_options(command: str, own: dict[str, Any], further: str, num_layers: int | None = None) -> dict[str, Any]:
    """What LOCKS is told: the options of a command's own, and those of its --options. Checked as the plug-in checks
    them, with `num_layers` against a model too, so that a bad value is told before vLLM starts. Raises CommandError."""
    from locks_vllm.options import parse_options

    told = json_object(command, "--options", further)
    for name in told.keys() & own.keys():
        raise usage_error(command, f"--options: {name!r} has an option of its own, --{name}")
    chosen = own | told
    try:
        options = parse_options(chosen)
        if num_layers is not None:
            options.check_layers(num_layers)
    except NOT_JSON as error:
        raise usage_error(command, error) from None
    return chosen


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which would else take the last of two values without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice, expected once")
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
