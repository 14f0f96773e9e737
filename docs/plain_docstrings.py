"""For Sphinx: the project's docstrings as reStructuredText. They list arguments as `name: text`, without markup."""

import re
from typing import Any

_ARGUMENT = re.compile(r"([a-z_]+(?:, [a-z_]+)*): (.*)")


def _escaped(text: str) -> str:
    """Without what reStructuredText takes for markup, but for what stands in backticks."""
    parts = text.split("`")
    return "`".join(re.sub(r"([*|])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(parts))


def process(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Turns the arguments of a function into fields, in place; the handler of autodoc-process-docstring."""
    result: list[str] = []
    in_fields = False
    for line in map(_escaped, lines):
        argument = _ARGUMENT.fullmatch(line) if what in ("function", "method") and result else None
        is_field = bool(argument) or (in_fields and line.startswith(" "))
        if result and line and is_field != in_fields and result[-1]:
            result.append("")
        result.append(f":{argument[1]}: {argument[2]}" if argument else line)
        in_fields = is_field
    lines[:] = result
