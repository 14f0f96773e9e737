"""Models by the shape of their attention: shapes that come with the package, and folders with a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from locks.commands import CommandError

SHAPES = Path(__file__).resolve().parent.parent / "shapes"


def load_shape(name: str) -> dict[str, Any]:
    """The config.json of a shape that comes with the package, or of a folder."""
    path = SHAPES / f"{name}.json"
    if not path.is_file():
        path = Path(name) / "config.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
        raise CommandError(f"{name!r}, expected {known}, or a folder with a config.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: not readable as JSON: {error}") from None
