"""The bytes of a record of the format fine at 128 channels, as locks::record_layout lays them out."""

from __future__ import annotations

from figures.drawing import Drawing

ROW, PAGES, X, WIDTH = 64, 4, 24, 890
RECORD = 544


def draw() -> str:
    drawing = Drawing(940, 400, "The 544 bytes of a record: rows of four pages, then scales, coefficients, header; "
                      "how two channels share a byte; its size beside the keys and values of 16 tokens.")
    drawing.text(X, 34, "a record: 16 tokens of one KV head, format fine, 128 channels, 544 bytes", "title")
    for page in range(PAGES):
        _page(drawing, page)
    tail_x = X + WIDTH * 512 / RECORD
    for offset, size, kind in ((512, 16, "scale"), (528, 8, "coefficient"), (536, 8, "header")):
        drawing.box(X + WIDTH * offset / RECORD, 64, WIDTH * size / RECORD - 1, 40, kind)
    drawing.text(tail_x, 58, "512", "small")
    _tail(drawing, tail_x)
    _byte(drawing)
    _sizes(drawing)
    return drawing.svg()


def _page(drawing: Drawing, page: int) -> None:
    unit = WIDTH / RECORD * ROW
    x = X + 2 * unit * page
    drawing.text(x, 58, f"{2 * ROW * page}: page {page}, tokens {4 * page} to {4 * page + 3}", "small")
    for row, kind in enumerate(("centroid", "basis")):
        drawing.box(x + row * unit, 64, unit - 2, 40, kind)
        drawing.text(x + row * unit + unit / 2, 88, f"{kind}, {ROW} bytes", "label", "middle")


def _tail(drawing: Drawing, tail_x: float) -> None:
    """The last 32 bytes, drawn larger."""
    x0, unit, y = 433, 15, 146
    drawing.path(f"M{tail_x:.1f} 106L{x0} {y - 4}", "thin")
    drawing.path(f"M{X + WIDTH} 106L{x0 + 32 * unit} {y - 4}", "thin")
    parts = [(0, 16, "scale", "scales: fp16, mu and V", "of each page"),
             (16, 8, "coefficient", "coefficients", "two a byte"), (24, 8, "header", "header", "magic, hash of keys")]
    for offset, size, kind, first, second in parts:
        x = x0 + offset * unit
        drawing.box(x, y, size * unit - 2, 36, kind)
        drawing.text(x + 6, y + 16, first, "label")
        drawing.text(x + 6, y + 30, second, "label")
        drawing.text(x, y + 50, str(512 + offset), "small")


def _byte(drawing: Drawing) -> None:
    y = 244
    drawing.text(X, y, "a byte of a 4-bit row: channels b and b + 64", "head")
    for number, (kind, text) in enumerate((("basis", "code[b + 64], two's complement"), ("centroid", "code[b] + 8"))):
        drawing.box(X + 220 * number, y + 24, 218, 30, kind)
        drawing.text(X + 220 * number + 109, y + 43, text, "mono", "middle")
    drawing.text(X, y + 18, "bit 7", "small")
    drawing.text(X + 438, y + 18, "bit 0", "small", "end")
    drawing.lines(X + 460, y + 36, (
        "As a signed char it is 16 code[b + 64] + code[b] + 8: both halves",
        "come from one load, and the 8 comes off a whole dot product once.",
    ))


def _sizes(drawing: Drawing) -> None:
    y = 330
    drawing.text(X, y + 8, "beside what it describes", "head")
    drawing.box(X, y + 20, WIDTH * 0.5, 18, "key")
    drawing.box(X + WIDTH * 0.5, y + 20, WIDTH * 0.5, 18, "value")
    drawing.text(X + 8, y + 33, "keys of 16 tokens, bf16: 4,096 bytes", "label")
    drawing.text(X + WIDTH * 0.5 + 8, y + 33, "values: 4,096 bytes", "label")
    drawing.box(X, y + 42, WIDTH * RECORD / 8192, 18, "centroid")
    drawing.text(X + WIDTH * RECORD / 8192 + 8, y + 55, "record: 544 bytes, 6.6 %", "small")
