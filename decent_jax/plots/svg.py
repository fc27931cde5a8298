"""Charts, topologies and bars as inline SVG, for `decent_jax.plots.page`."""

import html
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from decent_jax.ground.format import shorten
from decent_jax.plots.style import COLOURS, GREY, GRID, INK
from decent_jax.topology import Schedule

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, WIDTH - 14, 12, HEIGHT - 34  # of the panel
_POINTS = 500  # of a line; more than a page shows
_DASHES = {"-": "", "--": "7 4", ":": "2 3", "-.": "8 3 2 3"}
_LABEL = 44  # characters of a label under the mouse
_SIZE = 150  # of a round


class Line(NamedTuple):
    """A line of a chart; ``x`` and ``y`` are (m,)."""

    label: str
    colour: str
    x: np.ndarray
    y: np.ndarray
    dashes: str = "-"
    dots: bool = False


def chart(lines: Sequence[Line], x: str, log: bool = False) -> str:
    """Lines over each other; what the script of the page needs for the hover is beside them.

    Args:
      lines: of which at least one has a finite value.
      x: the words of the x axis.
      log: whether the y axis is logarithmic.
    """
    lines = [_thinned(line, log) for line in lines]
    lines = [line for line in lines if len(line.x)]
    x_low, x_high = _ends(np.concatenate([line.x for line in lines]), 0.0)
    late = [line.y[len(line.y) // 10 if len(line.y) >= 40 else 0 :] for line in lines]
    y_low, y_high = _ends(np.concatenate(late if not log else [line.y for line in lines]), 0.06)
    marks = [*_x_axis(x_low, x_high, x), *_y_axis(y_low, y_high, log)]

    def place(line: Line) -> list[str]:
        left = _LEFT + (line.x - x_low) / (x_high - x_low) * (_RIGHT - _LEFT)
        top = _BOTTOM - (line.y - y_low) / (y_high - y_low) * (_BOTTOM - _TOP)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(left, top, strict=True)]

    for line in lines:
        points = place(line)
        dashes = f' stroke-dasharray="{_DASHES[line.dashes]}"' if _DASHES[line.dashes] else ""
        marks.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{line.colour}" '
            f'stroke-width="1.8"{dashes} clip-path="url(#panel)"/>'
        )
        if line.dots or len(points) == 1:
            for a, b in (point.split(",") for point in points):
                place_of = f'cx="{a}" cy="{b}" r="3" clip-path="url(#panel)"'
                marks.append(f'<circle {place_of} fill="{line.colour}"/>')
    data = {
        "box": [_LEFT, _TOP, _RIGHT, _BOTTOM],
        "x": [x_low, x_high, x],
        "y": [y_low, y_high],
        "log": log,
        "lines": [
            {
                "label": shorten(line.label, _LABEL),
                "colour": line.colour,
                "x": line.x.tolist(),
                "y": line.y.tolist(),
            }
            for line in lines
        ],
    }
    return (
        f'<div class="chart"><svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(marks)}'
        f'<g class="hover"></g></svg><script type="application/json">{_json(data)}</script></div>'
    )


def panel() -> str:
    """The clip path that all charts share, once per page."""
    size = f'width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}"'
    rectangle = f'<rect x="{_LEFT}" y="{_TOP}" {size}/>'
    return f'<svg width="0" height="0"><clipPath id="panel">{rectangle}</clipPath></svg>'


def rounds(schedule: Schedule, most: int = 8) -> str:
    """Who sends to whom in each round, as replicas on a circle; the first ``most`` rounds."""
    n = schedule.num_replicas
    angles = 2 * np.pi * np.arange(n) / n - np.pi / 2
    middle, radius = _SIZE / 2, _SIZE / 2 - 16
    x, y = middle + radius * np.cos(angles), middle + radius * np.sin(angles)
    found = []
    for k, rnd in enumerate(schedule.rounds[:most]):
        receivers, senders = np.nonzero((rnd.matrix > 0) & ~np.eye(n, dtype=bool))
        marks = [
            f'<line x1="{x[j]:.1f}" y1="{y[j]:.1f}" x2="{x[i]:.1f}" y2="{y[i]:.1f}" '
            f'stroke="{COLOURS[k % len(COLOURS)]}" stroke-width="1.3" stroke-opacity="0.75"/>'
            for i, j in zip(receivers.tolist(), senders.tolist(), strict=True)
        ]
        for i in range(n):
            marks.append(f'<circle cx="{x[i]:.1f}" cy="{y[i]:.1f}" r="8" fill="white"/>')
            marks.append(_text(x[i], y[i] + 4, str(i), INK, "middle", 11))
        found.append(
            f'<figure><svg viewBox="0 0 {_SIZE} {_SIZE}" width="{_SIZE}">{"".join(marks)}</svg>'
            f"<figcaption>round {k} of {schedule.period}</figcaption></figure>"
        )
    return f'<div class="rounds">{"".join(found)}</div>'


def bar(parts: Sequence[tuple[float, str, str]]) -> str:
    """Shares of a whole as one bar: (share, colour, words that appear under the mouse)."""
    found, at = [], 0.0
    for share, colour, words in parts:
        place = f'x="{100 * at:.3f}%" width="{100 * share:.3f}%" height="26"'
        title = f"<title>{html.escape(words)}</title>"
        found.append(f'<rect {place} fill="{colour}">{title}</rect>')
        at += share
    return f'<svg class="bar" width="100%" height="26">{"".join(found)}</svg>'


# --- Parts of a chart -----------------------------------------------------------------------------


def _thinned(line: Line, log: bool) -> Line:
    """At most `_POINTS` of its finite values, the first and the last among them; their logarithm
    on a logarithmic axis."""
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.log10(line.y) if log else line.y
    fine = np.flatnonzero(np.isfinite(y) & np.isfinite(line.x))
    if len(fine) > _POINTS:
        fine = fine[np.linspace(0, len(fine) - 1, _POINTS).round().astype(int)]
    return line._replace(x=line.x[fine], y=y[fine])


def _ends(values: np.ndarray, margin: float) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    wider = margin * (high - low) or (0.0 if high > low else 0.05 * abs(high) or 1.0)
    return low - wider, high + wider


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between the ends, at most ``most`` of them or a few more.

    >>> _ticks(-3.0, 20.0, 5), _ticks(0.0, 1.0, 5)[-1], _ticks(0.5, 3.0, 2)
    ([0.0, 5.0, 10.0, 15.0, 20.0], 1.0, [2.0])
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _x_axis(low: float, high: float, words: str) -> list[str]:
    marks = [_text((_LEFT + _RIGHT) / 2, HEIGHT - 4, words, GREY, "middle", 11)]
    for value in _ticks(low, high, 7):
        at = _LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT)
        marks.append(_text(at, _BOTTOM + 15, f"{value:g}", GREY, "middle", 11))
    return marks


def _y_axis(low: float, high: float, log: bool) -> list[str]:
    values = _ticks(low, high, 5)
    if log:
        values, powers = [], range(math.floor(low), math.ceil(high) + 1)
        for multiples in ((1,), (1, 2, 5)):  # of powers of ten, more of them in a narrow range
            if len(values) < 4:
                values = [math.log10(m) + power for power in powers for m in multiples]
                values = [value for value in values if low <= value <= high]
    marks = []
    for value in values:
        at = _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP)
        ends = f'x1="{_LEFT}" x2="{_RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
        marks.append(f'<line {ends} stroke="{GRID}"/>')
        words = f"{10**value if log else value:.6g}"
        marks.append(_text(_LEFT - 6, at + 4, words, GREY, "end", 11))
    return marks


def _text(x: float, y: float, words: str, colour: str, anchor: str, size: int) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{html.escape(words)}</text>"


def _json(data: object) -> str:
    """JSON that ends no script."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")
