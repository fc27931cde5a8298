"""Draw step time against bandwidth, from the table that docs/clusters.md has of it.

    python benchmarks/bandwidth.py [--out docs/figures/bandwidth.png]

docs/clusters.md says how its table was measured, with benchmarks/step_time.py on hosts of
benchmarks/hosts.sh. A new measurement goes into the table first.
"""

import re
import sys
from pathlib import Path

import commands
from matplotlib.figure import Figure

from decent_jax.ground.command_line import picture_file
from decent_jax.plots.style import BLUE, GREEN, GREY, ORANGE, frame, new_figure, plain_numbers, save

ROOT = Path(__file__).resolve().parents[1]
TABLE, OUT = ROOT / "docs" / "clusters.md", ROOT / "docs" / "figures" / "bandwidth.png"
LINES = {
    "all_reduce": (ORANGE, "o-"),
    "one_peer_exp": (BLUE, "o-"),
    "hierarchical": (GREEN, "s-"),
    "no communication": (GREY, ":"),
}


def step_times(text: str) -> tuple[list[int], dict[str, list[int]]]:
    """(rates in Mbit/s, ms per step at each of them by the name of the row) of the page's table."""
    head, table = re.search(
        r"^(\| eight replicas [^|]*\| \d+ Mbit/s .*)\n((?:\|.*\n)+)", text, re.MULTILINE
    ).groups()
    rates = [int(rate) for rate in re.findall(r"(\d+) Mbit/s", head)]
    rows = {}
    for name in LINES:
        (cells,) = re.findall(rf"^\| {name}[^|]*\|(.*)\|$", table, re.MULTILINE)
        rows[name] = [int(re.match(r"\s*(\d+)", cell)[1]) for cell in cells.split("|")]
    return rates, rows


def draw(rates: list[int], rows: dict[str, list[int]]) -> Figure:
    """A line per algorithm, its name at the slow end."""
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    for name, times in rows.items():
        colour, line = LINES[name]
        axes.plot(rates, times, line, color=colour, lw=2, ms=5)
        axes.annotate(
            name, (rates[-1], times[-1]), xytext=(9, 0), textcoords="offset points",
            va="center", color=colour, size=10, annotation_clip=False,
        )  # fmt: skip
    axes.set(xscale="log", xlabel="link of each host, Mbit/s", ylim=(0, None))
    axes.invert_xaxis()
    frame(axes, "Milliseconds per step: eight replicas of 16.1 MB on four hosts")
    plain_numbers(axes.xaxis, (1.5, 3, 7.5))
    return figure


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=picture_file, default=OUT, metavar="FILE.png")
    options = parser.parse_args(arguments)
    print(save(draw(*step_times(TABLE.read_text())), options.out, dpi=110))
    return 0


if __name__ == "__main__":
    sys.exit(main())
