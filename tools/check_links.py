"""Checks the documentation site's links to other sites, and says what it checked: what `make links` runs.

Links within the site are checked by `make docs`, and those between files of the tree by tests/python/test_docs.py.

Exit code: 0 if every link leads to a page, 1 if one does not, 2 if nothing could be checked.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "links"
GOOD = ("working", "redirected")
PORTS = {"http": 80, "https": 443}
SECONDS = 10


def judge(links: Iterable[dict[str, Any]], answers: Callable[[str], bool]) -> tuple[int, str]:
    """The exit code and what to tell, from the rows of Sphinx's output.json. answers: whether a URI's host is there."""
    links = [link for link in links if link["uri"].startswith(("http://", "https://"))]
    bad = [link for link in links if link["status"] not in GOOD]
    lines = [f"{link['filename']}:{link['lineno']}: {link['uri']}: {link['info'] or link['status']}" for link in bad]
    # Sphinx has one status for a page that is gone and for a machine without network.
    if bad and bad == links and not any(answers(link["uri"]) for link in links):
        lines.append(f"0 of {_count(links)} checked: no host answers; run it where the network can be reached")
        return 2, "\n".join(lines)
    lines.append(f"{_count(links)} checked, {len(bad)} broken")
    return int(bool(bad)), "\n".join(lines)


def host_answers(uri: str) -> bool:
    """Whether a connection to the host of a link comes about."""
    parts = urlsplit(uri)
    try:
        socket.create_connection((parts.hostname, parts.port or PORTS[parts.scheme]), SECONDS).close()
    except OSError:
        return False
    return True


def _count(links: list[dict[str, Any]]) -> str:
    return f"{len(links)} link{'s' * (len(links) != 1)} to other sites"


def main() -> int:
    output = FOLDER / "output.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "linkcheck", ROOT / "docs", FOLDER]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if not output.is_file():
        print(f"{run.stderr}the site was not read, so no link was checked; `make docs` tells more", file=sys.stderr)
        return 2
    code, text = judge(map(json.loads, output.read_text().splitlines()), host_answers)
    print(text, file=sys.stderr if code else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
