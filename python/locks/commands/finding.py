"""What `locks doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` is None where all is well."""

    what: str
    found: str
    advice: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)  # what `found` tells, for --json

    def as_dict(self) -> dict[str, Any]:
        told = {"what": self.what, "found": self.found, "ok": self.advice is None, "advice": self.advice}
        return told | ({"numbers": self.numbers} if self.numbers else {})
