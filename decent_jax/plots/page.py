"""One self-contained HTML page about a run, or a comparison of several, drawn by plotly."""

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

import plotly.graph_objects as go

from decent_jax.ground.command_line import MARK
from decent_jax.ground.format import format_number
from decent_jax.ground.json_files import Json, write_atomic
from decent_jax.ground.run_folder import IGNORED, SCORES, RunFolder, smoothed
from decent_jax.monitor import goodput_file, run_state
from decent_jax.plots import style

REPORT = "report.html"  # in a run directory
LOSSES, CONSENSUS = ("train/loss", "eval/loss"), "train/consensus_distance_relative"
CHARTS = {  # the metrics of each chart, by its title
    "Loss by step: line training, dots validation": LOSSES,
    "Loss by seconds of training": LOSSES,
    **{title: (name,) for name, (title, _) in SCORES.items()},
    "Consensus distance, relative": (CONSENSUS,),
    "Seconds per step": ("perf/step_time_s",),
    "Training loss of each replica": tuple(f"replicas/{k}/loss" for k in range(32)),
}
_DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
_STYLE = "body { font: 15px sans-serif; margin: 2em } body > div { display: inline-block }"
_STYLE += "td, th { text-align: left; padding-right: 2em }"


def write(runs: Sequence[RunFolder], path: Path) -> Path:
    """Writes the page of these loaded and labelled runs to ``path``, and returns ``path``."""
    title = html.escape(runs[0].label if len(runs) == 1 else f"{len(runs)} runs")
    head = f'<meta charset="utf-8"><meta name="generator" content="{MARK}"><title>{title}</title>'
    parts = [f"<!doctype html>\n{head}<style>{_STYLE}</style><h1>{title}</h1>"]
    for k, figure in enumerate(_figures(runs)):
        page = figure.to_html({"displayModeBar": False}, full_html=False, include_plotlyjs=not k)
        parts.append(page)
    results, failed = [], []
    for state in (run_state.read(run.path) for run in runs):
        last = {name: state.last(name) for name in (*LOSSES, CONSENSUS, *SCORES)}
        shown = {name: format_number(newest[1], 4) for name, newest in last.items() if newest}
        shown |= {"time": goodput_file.describe(state.spent)} if state.spent else {}
        results.append({"state": state.word, "step": state.step, **shown})
        failed += [f"<li>{html.escape(what)}" for _, what in state.incidents[-20:]]
    names = sorted({name for run in runs for name in run.config})
    if len(runs) > 1:  # only settings that differ
        names = [name for name in names if len({str(run.config.get(name)) for run in runs}) > 1]
        names = [name for name in names if not {*name.split(".")} & {*IGNORED}]
    settings = [{name: run.config.get(name, "") for name in names} for run in runs]
    parts += [_table("Results", results, runs), _table("Settings", settings, runs)]
    parts += ["<h2>What failed</h2><ul>", *failed, "</ul>"] if failed else []
    write_atomic(path, "\n".join(parts).encode(errors="replace"))
    return path


def _figures(runs: Sequence[RunFolder]) -> Iterator[go.Figure]:
    """The charts for which some run has data."""
    for title, names in CHARTS.items():
        figure, of_replicas = go.Figure(), len(names) > 2  # replicas: only for a single run
        for k, run in enumerate(runs if not of_replicas or len(runs) == 1 else ()):
            for j, name in enumerate(name for name in names if run.has(name)):
                at, values = run.series(name, "time" if "seconds of" in title else "step")
                keep = sorted({*range(0, len(at), 1 + len(at) // 500), len(at) - 1} - {-1})
                dots, look = name.startswith("eval/"), style.look(j if of_replicas else k)
                values = values * SCORES[name][1] if name in SCORES else values
                figure.add_scatter(
                    x=at[keep],
                    y=(values if dots else smoothed(values))[keep],
                    name=name if len(runs) == 1 else html.escape(f"{run.label}, {name}"),
                    mode="markers" if dots else "lines",
                    line={"color": look["color"], "dash": _DASHES[look["ls"]]},
                )
        looks = {"width": 590, "height": 380, "template": "plotly_white", "hovermode": "x"}
        figure.update_layout(title=title, legend={"orientation": "h"}, **looks)
        figure.update_yaxes(type="log" if names == (CONSENSUS,) else "linear")
        if figure.data:
            yield figure


def _table(title: str, columns: Sequence[Json], runs: Sequence[RunFolder]) -> str:
    """An HTML table with a row per key and a column per run."""
    heads = "".join(f"<th>{html.escape(run.label)}</th>" for run in runs)
    rows = [f"<h2>{title}</h2><table><tr><th></th>{heads}</tr>"]
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = "".join(f"<td>{html.escape(str(column.get(name, '')))}</td>" for column in columns)
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    return "".join([*rows, "</table>"])
