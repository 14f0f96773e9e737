"""A drawing in SVG: a white card, so that it reads as well on a dark page, and the colours that all of them share."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

STYLE = """
.title{font-size:16px;font-weight:bold;fill:#1f2328}.head{font-size:13px;font-weight:bold;fill:#1f2328}
.text{font-size:12px;fill:#57606a}.small{font-size:11px;fill:#57606a}.label{font-size:11px;fill:#1f2328}
.mono{font-size:11px;font-family:monospace;fill:#1f2328}
.key{fill:#9ec5fe}.value{fill:#cfe2ff}.centroid{fill:#ffb454}.basis{fill:#ffd8a0}.coefficient{fill:#b197fc}
.scale{fill:#96d5b0}.header{fill:#ced4da}.chosen{fill:#2f9e44}.dropped{fill:#dee2e6}.dense{fill:#9ec5fe}
.line{stroke:#57606a;stroke-width:1.5;fill:none}.thin{stroke:#8c959f;stroke-width:1;fill:none}
.dash{stroke:#57606a;stroke-width:1.2;stroke-dasharray:4 3;fill:none}.bold{stroke:#e8590c;stroke-width:2.5;fill:none}
.dots-dropped,.dots-chosen{stroke-linecap:round;fill:none}.dots-dropped{stroke:#adb5bd;stroke-width:2.6}
.dots-chosen{stroke:#2f9e44;stroke-width:4}
""".replace("\n", "")


class Drawing:
    """What is added is drawn in order, in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{escape(label)}">',
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#57606a"/></marker>'
            f"<style>{STYLE}</style></defs>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "text", anchor: str = "start") -> None:
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def lines(self, x: float, y: float, texts: Iterable[str], kind: str = "text") -> None:
        for number, text in enumerate(texts):
            self.text(x, y + 16 * number, text, kind)

    def path(self, d: str, kind: str = "line", arrow: bool = False) -> None:
        marker = ' marker-end="url(#arrow)"' if arrow else ""
        self._parts.append(f'<path class="{kind}" d="{d}"{marker}/>')

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        self._parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def dots(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Many points in one path: strokes without length, whose round ends are the dots."""
        self.path("".join(f"M{x:.1f} {y:.1f}h0" for x, y in points), kind)

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"
