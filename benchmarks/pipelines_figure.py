"""The picture of the README: machines with the plan drawn on them, and a measured step.

    python benchmarks/pipelines_figure.py pipelines_out/rows.jsonl [--case 'case 5']

Both are of the same run of benchmarks/pipelines.py, whose rows it reads.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import commands
from ray_hosts import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks.pipeline_cases import REPLICAS, STAGES, network_of
from benchmarks.pipelines import GOSSIP, read
from decent_jax.plots.style import BLUE, GREEN, GREY, INK, ORANGE, frame, new_figure, save

PLACES = {  # degrees east and north
    "Virginia": (-77.5, 39.0),
    "Ohio": (-83.0, 40.0),
    "Oregon": (-119.7, 45.8),
    "California": (-121.9, 37.4),
    "Ireland": (-6.3, 53.3),
}
APART = 5.0  # degrees between machines of a place


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--case", default="case 5")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "pipelines.png")
    options = parser.parse_args(arguments)
    row = next(
        one
        for one in read(options.rows)
        if (one["case"], one["layout"], one["algorithm"], one["table"])
        == (options.case, "plan", GOSSIP, "layouts")
    )
    names = network_of(options.case).names
    figure = new_figure(12, 4.4, wspace=0.05)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    draw_map(left, row, names)
    draw_step(right, row, names)
    save(figure, options.out)
    print(options.out)


def draw_map(axes: Any, row: dict[str, Any], names: tuple[str, ...]) -> None:
    """Machines where they are, pipelines as lines, and who averages with whom."""
    where = {}
    for machine, name in enumerate(names):
        place = name.split("/")[0]
        same = [one for one in names if one.startswith(f"{place}/")]
        east, north = PLACES[place]
        where[machine] = (east, north + APART * same.index(name))
        if where[machine][1] == north:
            axes.annotate(place, (east, north - 1.6), ha="center", va="top", size=9, color=INK)
    for group in row["stages"]:
        for pair in itertools.combinations(group, 2):
            xs, ys = zip(*(where[one] for one in pair), strict=True)
            axes.plot(xs, ys, ":", color=ORANGE, lw=1.8, zorder=1)
    for column in zip(*row["stages"], strict=True):
        xs, ys = zip(*(where[one] for one in column), strict=True)
        axes.plot(xs, ys, "-", color=BLUE, lw=2.2, zorder=2)
        for stage, machine in enumerate(column):
            axes.plot(*where[machine], "o", ms=15, color=BLUE, mec="white", zorder=3)
            axes.annotate(
                str(stage), where[machine], ha="center", va="center", size=9, color="white"
            )
    axes.plot([], [], "-", color=BLUE, label="a pipeline, with its stages")
    axes.plot([], [], ":", color=ORANGE, label="stages that gossip")
    axes.legend(frameon=False, fontsize=9, loc="lower center", ncols=2, bbox_to_anchor=(0.5, -0.12))
    axes.set_title("The plan", loc="left", size=11, color=INK)
    axes.margins(0.12, 0.3)
    axes.set_axis_off()


def draw_step(axes: Any, row: dict[str, Any], names: tuple[str, ...]) -> None:
    """What each cell computed in the last step."""
    cells = list(itertools.product(range(REPLICAS), range(STAGES)))
    last = [one["actions"][len(one["actions"]) // 2 :] for one in row["reports"]]
    start = min(actions[0][2] for actions in last)
    for y, actions in enumerate(last):
        for action, _, began, ended in actions:
            colour = BLUE if action == "forward" else GREEN
            axes.barh(y, ended - began, left=began - start, height=0.8, color=colour)
    places = [names[row["stages"][s][i]].split("/")[0] for i, s in cells]
    labels = [f"stage {s}, {place}" for (_, s), place in zip(cells, places, strict=True)]
    axes.set_yticks(range(len(cells)), labels)
    axes.axhline(STAGES - 0.5, color=GREY, lw=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds", color=GREY)
    frame(axes, f"A measured step, {row['step_s']:.1f} s: forward blue, backward green")


if __name__ == "__main__":
    main(sys.argv[1:])
