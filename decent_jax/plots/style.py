"""The style of every figure: colours, frames, logarithmic axes, legends."""

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
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from decent_jax.ground.command_line import MARK
from decent_jax.ground.json_files import Json

# Okabe and Ito's colours, which colour-blind readers can distinguish (without the pale yellow).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
BLUE, ORANGE, GREEN, PINK = COLOURS[:4]
INK, GREY, GRID = "#222222", "#6b6b6b", "#e6e6e6"
MARKS = "osD^vPX*"


def new_figure(width: float, height: float, **spacing: Any) -> Figure:
    """An empty figure of this size, in inches, that leaves room for every label.

    Args:
      spacing: spaces between panels; see `matplotlib.layout_engine.ConstrainedLayoutEngine`.
    """
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(**spacing))


def grid(count: int, columns: int, labels: Sequence[str] = ()) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels below a legend of ``labels``, with the `look` of each line."""
    width, rows = 5.6 * columns, -(-count // columns)
    labels = [as_it_is(label) for label in labels]
    legend_columns = _legend_columns(labels, width)
    height = 3.3 * rows + 0.5 + 0.25 * -(-len(labels) // legend_columns)
    figure = new_figure(width, height, w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
    panels = [figure.add_subplot(rows, columns, k + 1) for k in range(count)]
    if labels:
        lines = [Line2D([], [], lw=2.5, label=label, **look(k)) for k, label in enumerate(labels)]
        legend(figure, lines, size=10, ncols=legend_columns)
    return figure, panels


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """The number of columns of these labels that fit into ``width`` inches."""
    inches = 0.076 * (max(map(len, labels), default=0) + 7)  # letters, and 7 for the line
    return max(1, min(len(labels), 3, int(width / inches)))


def look(k: int) -> Json:
    """The colour and the dashes of the k-th line."""
    return {"color": COLOURS[k % len(COLOURS)], "ls": ("-", "--", ":", "-.")[k // len(COLOURS) % 4]}


def title(axes: Axes, text: str, pad: float | None = None) -> None:
    """Writes the title of a panel at its left."""
    axes.set_title(text, loc="left", size=11, color=INK, pad=pad)


def frame(axes: Axes, text: str, aside: str = "", pad: float | None = None) -> None:
    """Gives a panel a title and a light grid behind the data, without a box or ticks.

    Args:
      aside: text to the right of the title.
      pad: points between panel and title.
    """
    title(axes, text, pad)
    axes.set_title(aside, loc="right", size=8.5, color=GREY, pad=pad)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b5b5b5")
    axes.tick_params(which="both", colors=GREY, labelsize=9, length=0)


def curve_frame(axes: Axes, text: str, aside: str = "", x: str = "step") -> None:
    """Gives a panel of curves its `frame` and the label of its x axis."""
    frame(axes, text, aside, pad=9)
    axes.set_xlabel(x, color=GREY, size=9)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
    axes.margins(x=0.012)


def plain_numbers(axis: Axis, multiples: Iterable[float] = (1, 2, 5)) -> None:
    """Labels a logarithmic axis with numbers like 0.1 and 500, at multiples of powers of ten."""
    axis.set_major_locator(LogLocator(subs=tuple(multiples), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def log_axis(axes: Axes, values: np.ndarray) -> None:
    """Gives a panel a logarithmic y axis, of at least a decade, with plain numbers for labels."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        axes.set_yticks([])
        return
    low, high = values.min(), values.max()
    # The rounding error of an all-reduce, a distance of 1e-7, would take most of the axis.
    real = values[values > 1e-4 * high]
    if len(real) and low < real.min():
        low = real.min() / 3
    widen = max(1.15, (10 * low / high) ** 0.5)
    axes.set(yscale="log", ylim=(low / widen, high * widen))
    plain_numbers(axes.yaxis, (1, 2, 5) if high / low < 300 else (1,))


def hold(axes: Axes, values: np.ndarray) -> None:
    """Limits a linear y axis to the finite values, with a margin."""
    values = values[np.isfinite(values)]
    if len(values):
        low, high = values.min(), values.max()
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)


def time_unit(seconds: float) -> tuple[str, int]:
    """A suitable unit for times up to ``seconds``, and its length in seconds.

    >>> [time_unit(seconds) for seconds in (120, 121, 7200, 7201)]
    [('s', 1), ('min', 60), ('min', 60), ('h', 3600)]
    """
    return ("h", 3600) if seconds > 7200 else ("min", 60) if seconds > 120 else ("s", 1)


def legend(figure: Figure, handles: Sequence[Artist], size: float = 9, **options: Any) -> None:
    """Adds a legend of labelled lines, bars or marks outside all panels, by default above them.

    Args:
      options: as for `matplotlib.figure.Figure.legend`.
    """
    options = {"loc": "outside upper left", "frameon": False, "labelcolor": INK} | options
    figure.legend(handles=list(handles), fontsize=size, **options)


def as_it_is(label: str) -> str:
    """A label that matplotlib shows literally: not as a formula, and not hidden by its "_"."""
    label = label.replace("$", r"\$")
    return " " + label if label.startswith("_") else label


def save(figure: Figure, path: str | Path, dpi: int = 120) -> Path:
    """Writes the figure, creates its folder if necessary, and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    key = {".png": "Software", ".pdf": "Creator", ".svg": "Creator"}.get(path.suffix.lower())
    with warnings.catch_warnings(action="ignore"):  # about a large legend or a missing glyph
        figure.savefig(path, dpi=dpi, facecolor="white", metadata={key: MARK} if key else None)
    return path
