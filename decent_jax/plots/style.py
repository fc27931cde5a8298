"""How every figure of this project looks: colours, frames, logarithmic axes, legends."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from decent_jax.ground.replaceable import MARK

# Okabe and Ito's colours, which colour-blind readers can tell apart (their yellow is too pale).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
BLUE, ORANGE, GREEN, PINK = COLOURS[:4]
INK, GREY, GRID = "#222222", "#6b6b6b", "#e6e6e6"
MARKS = "osD^vPX*"


def new_figure(width: float, height: float, **spacing: Any) -> Figure:
    """An empty figure, sizes in inches, which leaves room for every label.

    Args:
      spacing: between panels; see `matplotlib.layout_engine.ConstrainedLayoutEngine`.
    """
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(**spacing))


def title(axes: Axes, text: str, size: float = 11, pad: float | None = None) -> None:
    """Write the title of a panel at its left."""
    axes.set_title(text, loc="left", size=size, color=INK, pad=pad)


def frame(axes: Axes, text: str, size: float = 11, pad: float | None = None) -> None:
    """Give a panel its title, a light grid behind the data, and neither box nor ticks.

    Args:
      size: of the title, in points; the numbers at the axes are two points smaller.
      pad: points between panel and title.
    """
    title(axes, text, size, pad)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", colors=GREY, labelsize=size - 2, length=0)


def plain_numbers(axis: Axis, multiples: Iterable[float] = (1, 2, 5)) -> None:
    """Write 0.1, 2 or 500 at a logarithmic axis, at these multiples of the powers of ten."""
    axis.set_major_locator(LogLocator(subs=tuple(multiples), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def hold(axes: Axes, values: np.ndarray) -> None:
    """Limit a linear y axis to the finite ones of these values, with a margin."""
    values = values[np.isfinite(values)]
    if len(values):
        low, high = values.min(), values.max()
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)


def time_unit(seconds: float) -> tuple[str, int]:
    """A unit that suits times up to ``seconds``, and its seconds."""
    return ("h", 3600) if seconds > 7200 else ("min", 60) if seconds > 120 else ("s", 1)


def legend(figure: Figure, handles: Sequence[Artist], size: float = 9, **options: Any) -> None:
    """Explain labelled lines, bars or marks outside all panels: above, unless ``options`` say else.

    Args:
      options: of `matplotlib.figure.Figure.legend`.
    """
    options = {"loc": "outside upper left", "frameon": False, "labelcolor": INK} | options
    figure.legend(handles=list(handles), fontsize=size, **options)


def legend_columns(labels: Sequence[str], width: float, size: float) -> int:
    """How many columns of these labels, in letters of ``size`` points, ``width`` inches hold."""
    inches = 0.0076 * size * (max(map(len, labels)) + 7)  # of a line, and of an average letter
    return max(1, min(len(labels), 3, int(width / inches)))


def as_it_is(label: str) -> str:
    """A label that matplotlib shows as it is: not as a formula, and not hidden for its "_"."""
    label = label.replace("$", r"\$")
    return " " + label if label.startswith("_") else label


def save(figure: Figure, path: str | Path, dpi: int = 120) -> Path:
    """Write the figure, make its folder if need be, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    key = {".png": "Software", ".pdf": "Creator", ".svg": "Creator"}.get(path.suffix.lower())
    with warnings.catch_warnings(action="ignore"):  # of a legend that fills the page, of a glyph
        figure.savefig(path, dpi=dpi, facecolor="white", metadata={key: MARK} if key else None)
    return path
