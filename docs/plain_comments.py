"""Doxygen's input filter: prints a C++ header with its plain comments as Doxygen's, and without private members.

A comment above a declaration documents it, one at the end of a line what stands in that line, and the first one of the
file the file. Indented lines of a comment, formulas and tables, stay as they are laid out.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_WHOLE_LINE = re.compile(r"(\s*)// ?(.*)")
_AT_END = re.compile(r"(.*[;,{]\s*)// (?!NOLINT|IWYU)(.*)")


def _escaped(text: str) -> str:
    """The text of a comment without what Doxygen takes for commands and tags, or, but for *words*, emphasis."""
    return re.sub(r"\*\w[\w ]*\w\*|[\\@<>#*]", lambda found: found[0] if len(found[0]) > 1 else "\\" + found[0], text)


def _public(lines: list[str]) -> Iterator[str]:
    shown = True
    for line in lines:
        shown = (shown or line == "};") and line.strip() != "private:"
        if shown:
            yield line


def converted(lines: list[str]) -> list[str]:
    result: list[str] = []
    tail_column = None  # where the comment at the end of the line above begins
    in_block = laid_out = False
    for line in _public(lines):
        whole = _WHOLE_LINE.fullmatch(line)
        at_end = None if whole else _AT_END.fullmatch(line)
        if whole and tail_column == len(whole[1]):
            result.append(f"{whole[1]}///< {_escaped(whole[2])}")
            continue
        tail_column = len(at_end[1]) if at_end else None
        if whole:
            indented = whole[2].startswith("  ")
            if not result:
                result.append("/// @file")
            if in_block and indented != laid_out:
                result.append(f"{whole[1]}///")
            # Four more columns are what Markdown calls code, where nothing needs an escape.
            result.append(f"{whole[1]}/// {f'    {whole[2]}' if indented else _escaped(whole[2])}".rstrip())
            in_block, laid_out = True, indented
            continue
        in_block = False
        result.append(f"{at_end[1]}///< {_escaped(at_end[2])}" if at_end else line)
    return result


if __name__ == "__main__":
    print("\n".join(converted(Path(sys.argv[1]).read_text().splitlines())))
