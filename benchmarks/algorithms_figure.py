"""The picture of `algorithms.py`: a panel for each of its parts that ran."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from decent_jax.plots.style import COLOURS, GREY, frame, new_figure

ZERO = 1e-4  # where "0" is drawn on a logarithmic axis
LINE_INCHES = 0.21


def draw(rows: list[dict]) -> Figure:
    """The figure of the rows of some parts; a dot per seed, and lines of means for topologies."""
    panels = [panel for part, panel in PANELS.items() if any(row["part"] == part for row in rows)]
    heights = [_lines(panel, rows) * LINE_INCHES + 1.1 for panel in panels]
    figure = new_figure(6.4 * len(panels), max(heights))
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        panel(axes, rows)
        legend = axes.legend(
            frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3
        )
        lines = -(-len(legend.get_texts()) // 3)
        axes.set_title(axes.get_title(loc="left"), loc="left", size=12, pad=10 + 15 * lines)
    return figure


def _lines(panel, rows: list[dict]) -> int:
    if panel is _topologies:
        return 18
    part = next(part for part, one in PANELS.items() if one is panel)
    mine = [row for row in rows if row["part"] == part and "method" in row]
    return len({_name(row) for row in mine})


def _name(row: dict) -> str:
    """The name of a line: quadratic has a line per method, and its schedules are the colours."""
    schedule = row["schedule"].replace("bidirectional_ring", "ring").replace("one_peer_exp", "exp")
    return row["method"] if row["part"] == "quadratic" else f"{row['method']}  ·  {schedule}"


def _dots(axes, rows: list[dict], value, series, labels: dict) -> None:
    """A line per name, a dot per row: ``value(row)``, coloured by ``series(row)``."""
    names = list(dict.fromkeys(map(_name, rows)))
    for k, (key, label) in enumerate(labels.items()):
        mine = [row for row in rows if series(row) == key]
        places = [names.index(_name(row)) for row in mine]
        axes.plot([value(row) for row in mine], places, "o", color=COLOURS[k], ms=5, mec="white",
                  mew=0.6, label=label, zorder=4 - 0.1 * k)  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _quadratic(axes, rows: list[dict]) -> None:
    mine = [row for row in rows if row["part"] == "quadratic" and "refused" not in row]
    known = {"bidirectional_ring": "ring", "one_peer_exp": "one_peer_exp"}
    _dots(
        axes,
        [row for row in mine if row["largest_distance"] < 1e3],
        lambda row: max(row["largest_distance"], ZERO),
        lambda row: row["schedule"] if row["schedule"] in known else "",
        known | {"": "a schedule of its own"},
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "0" if x <= ZERO else f"{x:g}"))
    _frame(axes, "quadratic", "largest distance from the optimum at the end")


def _images(axes, rows: list[dict]) -> None:
    mine = [row for row in rows if row["part"] == "images"]
    alphas = list(dict.fromkeys(row["alpha"] for row in mine))
    labels = {alpha: f"alpha {alpha:g}" for alpha in alphas}
    _dots(axes, mine, _percent, lambda row: row["alpha"], labels)
    _frame(axes, "images", "accuracy of the consensus model, %")


def _topologies(axes, rows: list[dict]) -> None:
    mine = [row for row in rows if row["part"] == "topologies"]
    sizes = sorted({row["num_replicas"] for row in mine})
    for k, name in enumerate(dict.fromkeys(row["schedule"] for row in reversed(mine))):
        own = [[row for row in mine if _at(row) == (name, n)] for n in sizes]
        axes.plot(
            sizes,
            [np.mean([_percent(row) for row in seeds]) for seeds in own],
            "o-",
            color=COLOURS[k % len(COLOURS)],
            ms=4.5,
            lw=1.6,
            label=name.partition("(")[0],
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.minorticks_off()
    _frame(axes, "topologies", "replicas")
    axes.set_ylabel("accuracy of the consensus model, %", color=GREY)


def _at(row: dict) -> tuple[str, int]:
    return row["schedule"], row["num_replicas"]


def _drops(axes, rows: list[dict]) -> None:
    mine = [row for row in rows if row["part"] == "drops" and row["problem"] == "images"]
    losses = list(dict.fromkeys(row["loss"] for row in mine))
    labels = {loss: f"{loss:.0%} lost" for loss in losses}
    _dots(axes, mine, _percent, lambda row: row["loss"], labels)
    _frame(axes, "drops", "accuracy of the consensus model, %")


def _percent(row: dict) -> float:
    return 100 * row["accuracy"]


def _frame(axes, title: str, unit: str) -> None:
    frame(axes, title)
    axes.set_xlabel(unit, color=GREY)


PANELS = {"quadratic": _quadratic, "images": _images, "topologies": _topologies, "drops": _drops}
