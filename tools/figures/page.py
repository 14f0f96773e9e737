"""A page and its summary: four keys, their centroid, the leading eigenvector and the coefficients on it."""

from __future__ import annotations

import numpy as np

from figures.drawing import Drawing

# Two channels stand for all; the numbers are chosen to be seen, the rest is computed from them.
KEYS = np.array([[-1.6, -0.5], [-0.5, -0.75], [0.45, 0.7], [1.65, 0.55]]) + [2.3, 1.9]
ORIGIN, SCALE = (70, 330), 78


def _place(point: np.ndarray) -> tuple[float, float]:
    return ORIGIN[0] + SCALE * float(point[0]), ORIGIN[1] - SCALE * float(point[1])


def draw() -> str:
    drawing = Drawing(940, 390, "Four keys of a page as points, the centroid between them, the direction in which they "
                      "differ most, and their coefficients along it; beside it what is stored of them.")
    drawing.text(24, 34, "a page: the keys of 4 tokens", "title")
    drawing.text(24, 54, "two channels drawn of 128")
    centroid = KEYS.mean(axis=0)
    centred = KEYS - centroid
    values, vectors = np.linalg.eigh(centred.T @ centred)
    direction = vectors[:, -1] * np.sign(vectors[0, -1])
    coefficients = centred @ direction
    _axes(drawing)
    _summary_lines(drawing, centroid, direction)
    for number, (key, coefficient) in enumerate(zip(KEYS, coefficients, strict=True)):
        x, y = _place(key)
        near_x, near_y = _place(centroid + coefficient * direction)
        drawing.path(f"M{x:.1f} {y:.1f}L{near_x:.1f} {near_y:.1f}", "dash")
        drawing.circle(near_x, near_y, 5, "coefficient")
        drawing.circle(x, y, 8, "key")
        drawing.text(x, y - 13 if y < near_y else y + 22, f"k{number + 1}", "head", "middle")
    _stored(drawing, coefficients, values[-1] / values.sum())
    return drawing.svg()


def _axes(drawing: Drawing) -> None:
    x, y = ORIGIN
    drawing.path(f"M{x} {y}H{x + 350}", "thin", arrow=True)
    drawing.path(f"M{x} {y}V{y - 255}", "thin", arrow=True)
    drawing.text(x + 350, y + 18, "one channel of the keys", "small", "end")
    drawing.text(x - 10, y - 240, "another", "small", "end")


def _summary_lines(drawing: Drawing, centroid: np.ndarray, direction: np.ndarray) -> None:
    x, y = _place(centroid)
    drawing.path(f"M{ORIGIN[0]} {ORIGIN[1]}L{x:.1f} {y:.1f}", "line", arrow=True)
    (x0, y0), (x1, y1) = _place(centroid - 2.2 * direction), _place(centroid + 2.2 * direction)
    drawing.path(f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}", "bold")
    drawing.circle(x, y, 7, "centroid")
    drawing.text(x + 12, y + 20, "centroid mu", "head")
    drawing.text(x1 - 10, y1 - 12, "direction V", "head", "end")


def _stored(drawing: Drawing, coefficients: np.ndarray, share: float) -> None:
    x = 490
    drawing.text(x, 34, "its summary in the format fine, 128 channels", "title")
    rows = [
        (74, 256, "centroid", "centroid mu: the mean of the keys", "128 numbers of 4 bits: 64 bytes"),
        (144, 256, "basis", "V: the leading eigenvector of the centred keys", "128 numbers of 4 bits: 64 bytes"),
        (214, 60, "coefficient", "coefficients c = V (k - mu), one a token", "4 numbers of 4 bits: 2 bytes"),
        (284, 60, "scale", "scales of the two", "2 numbers of 16 bits: 4 bytes"),
    ]
    for y, width, kind, what, size in rows:
        drawing.text(x, y, what, "head")
        drawing.box(x, y + 8, width, 20, kind)
        drawing.text(x + width + 12, y + 22, size)
    drawing.text(x, 258, "in the drawing: " + ", ".join(f"{value:+.2f}" for value in coefficients), "small")
    drawing.lines(x, 344, (
        "134 bytes where the keys and values of the page take 2,048 in bf16.",
        f"In the drawing the direction holds {100 * share:.0f} % of the spread; what is left of a key, dashed,",
    ), "text")
    drawing.text(x, 376, "is the residual, which bounds the error of a score.")
