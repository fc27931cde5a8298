"""One HTML page about a run, or a comparison of several, that needs nothing besides itself."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decent_jax import topology
from decent_jax.ground import account, run_state
from decent_jax.ground.command_line import MARK
from decent_jax.ground.format import format_bytes, format_duration, format_number, printable
from decent_jax.ground.json_files import write_atomic
from decent_jax.ground.run_folder import IGNORED, SCORES, RunFolder, smoothed
from decent_jax.ground.run_state import RunState
from decent_jax.plots import style, svg
from decent_jax.plots.style import BLUE, COLOURS, GREEN, ORANGE
from decent_jax.plots.svg import Line

REPORT = "report.html"  # of a run directory
CONSENSUS = "train/consensus_distance_relative"
# The first that all runs have is drawn, else the last.
_SPEEDS = {
    "perf/tokens_per_s": "Tokens per second",
    "perf/examples_per_s": "Examples per second",
    "perf/step_time_s": "Seconds per step",
}
_SPENT: tuple[str, ...] = ("steps", *account.CAUSES)
_COLOURS: dict[str, str] = dict(
    zip(_SPENT, (GREEN, BLUE, ORANGE, *COLOURS[3:], "#b5b5b5"), strict=True)
)
_MOST_REPLICAS = 32  # in a chart, and on a circle

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 2em auto; max-width: 1180px;
       padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin: 1.6em 0 .4em } h3 { font-size: 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15em .9em .15em 0; text-align: left; vertical-align: top }
th { font-weight: 600; color: #6b6b6b } tr + tr > * { border-top: 1px solid #e6e6e6 }
.charts, .rounds { display: flex; flex-wrap: wrap; gap: 1em 1.5em }
.charts > div { flex: 1 1 480px; max-width: 580px } .chart svg { width: 100%; cursor: crosshair }
figure { margin: 0; text-align: center; color: #6b6b6b; font-size: .85em }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
.key + span { margin-right: 1.2em } .bar { border-radius: 3px; display: block }
summary { cursor: pointer }
"""

# A vertical line and the values of all lines of a chart where the mouse is.
_SCRIPT = """
const NS = "http://www.w3.org/2000/svg";
const add = (parent, name, attributes, words) => {
  const made = parent.appendChild(document.createElementNS(NS, name));
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (words !== undefined) made.textContent = words;
  return made;
};
const shown = value => value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3
  ? value.toExponential(2) : String(Number(value.toPrecision(4)));
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return x - xs[low] <= xs[high] - x ? low : high;
};
for (const chart of document.querySelectorAll(".chart")) {
  const data = JSON.parse(chart.querySelector("script").textContent);
  const svg = chart.querySelector("svg"), hover = chart.querySelector(".hover");
  const [left, top, right, bottom] = data.box, [xLow, xHigh, unit] = data.x, [yLow, yHigh] = data.y;
  svg.addEventListener("mouseleave", () => hover.replaceChildren());
  svg.addEventListener("mousemove", event => {
    hover.replaceChildren();
    const frame = svg.getBoundingClientRect();
    const at = (event.clientX - frame.left) / frame.width * svg.viewBox.baseVal.width;
    const x = xLow + (Math.min(Math.max(at, left), right) - left) / (right - left) * (xHigh - xLow);
    const place = value => left + (value - xLow) / (xHigh - xLow) * (right - left);
    const near = (xHigh - xLow) / 50;  // a line that has ended says nothing
    const lines = data.lines.filter(({x: xs}) => xs[0] - near <= x && x <= xs.at(-1) + near);
    if (!lines.length) return;
    const rows = lines.map(line => {
      const k = nearest(line.x, x), height = (line.y[k] - yLow) / (yHigh - yLow);
      const value = data.log ? 10 ** line.y[k] : line.y[k];
      if (height >= 0 && height <= 1) add(hover, "circle", {cx: place(line.x[k]),
        cy: bottom - height * (bottom - top), r: 4, fill: line.colour, stroke: "white"});
      return [`${shown(value)}  ${line.label}`, line.colour, line.x[k], value];
    }).sort((a, b) => b[3] - a[3]);
    const closest = rows.reduce((a, b) => Math.abs(a[2] - x) <= Math.abs(b[2] - x) ? a : b)[2];
    add(hover, "line", {x1: place(closest), x2: place(closest), y1: top, y2: bottom,
      stroke: "#999", "stroke-dasharray": "3 3"});
    const far = place(closest) > (left + right) / 2;
    const box = add(hover, "rect", {fill: "white", "fill-opacity": 0.9, stroke: "#ccc", rx: 3});
    const texts = [[`${shown(closest)} ${unit}`, "#222"], ...rows.slice(0, 14)].map((row, k) =>
      add(hover, "text", {x: 0, y: top + 16 + 15 * k, fill: row[1], "font-size": 12}, row[0]));
    const width = Math.max(...texts.map(text => text.getComputedTextLength())) + 12;
    const beside = far ? place(closest) - width - 8 : place(closest) + 8;
    const start = Math.max(0, Math.min(beside, svg.viewBox.baseVal.width - width));
    for (const text of texts) text.setAttribute("x", start + 6);
    for (const [key, value] of Object.entries({x: start, y: top + 2, width,
      height: 15 * texts.length + 6})) box.setAttribute(key, value);
  });
}
"""


def write(runs: Sequence[RunFolder], path: str | Path) -> Path:
    """Write the page of these loaded and labelled runs, and return its path."""
    path = Path(path)
    write_atomic(path, page(runs, [run_state.read(run.path) for run in runs]).encode())
    return path


def page(runs: Sequence[RunFolder], states: Sequence[RunState]) -> str:
    """The text of the page; ``states`` are those of the runs."""
    for k, run in enumerate(runs):
        run.colour, run.dashes = style.look(k).values()
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    parts = [f"<h1>{_words(title)}</h1>"]
    if len(runs) > 1:
        parts.append(_legend([(run.colour, run.label) for run in runs]))
    parts += [svg.panel(), '<div class="charts">', *_charts(runs), "</div>"]
    parts += ["<h2>Results</h2>", _results(runs, states)]
    parts += [*_times(runs, states), *_topologies(runs), *_settings(runs), *_incidents(states)]
    head = f'<meta charset="utf-8"><meta name="generator" content="{MARK}">'
    head += f"<title>{_words(title)}</title><style>{_STYLE}</style>"
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


# --- Charts ---------------------------------------------------------------------------------------


def _charts(runs: Sequence[RunFolder]) -> list[str]:
    found, alone = [], len(runs) == 1
    longest = max(run.series("perf/wall_time_s")[1].max(initial=0.0) for run in runs)
    unit, scale = style.time_unit(longest)
    for x, words, size in (("step", "step", 1), ("time", f"{unit} of training", scale)):
        lines = [
            line
            for run in runs
            for line in (_line(run, "train/loss", x, size), _validation(run, x, size, alone))
            if line is not None
        ]
        found.append(_chart(f"Loss by {x}: line training, dots validation", lines, words))
    for name, (title, factor) in SCORES.items():
        found.append(_chart(title, [_score(run, name, factor) for run in runs], "step"))
    consensus = [_line(run, CONSENSUS) for run in runs]
    found.append(_chart("Consensus distance, relative", consensus, "step", log=True))
    for name, title in _SPEEDS.items():
        if all(run.has(name) for run in runs) or name == "perf/step_time_s":
            found.append(_chart(title, [_line(run, name) for run in runs], "step"))
            break
    if alone:
        found.append(_chart("Training loss of each replica", _of_replicas(runs[0]), "step"))
    return [chart for chart in found if chart]


def _chart(title: str, lines: Sequence[Line | None], x: str, log: bool = False) -> str:
    """A titled chart, or "" where no line has a value that it can show."""
    drawn = [line for line in lines if line is not None and (not log or (line.y > 0).any())]
    return f"<div><h3>{title}</h3>{svg.chart(drawn, x, log)}</div>" if drawn else ""


def _line(run: RunFolder, name: str, x: str = "step", scale: float = 1) -> Line | None:
    """A metric of a run, smoothed where it is noisy; None without a finite value."""
    at, values = run.series(name, x)
    if not run.has(name) or not len(at):
        return None
    noisy = name == "train/loss" or name.startswith("perf/")
    values = smoothed(values) if noisy else values
    return Line(run.label, run.colour, at / scale, values, run.dashes)


def _validation(run: RunFolder, x: str, scale: float, alone: bool) -> Line | None:
    """Of the consensus model, in the run's colour where there are several."""
    line = _line(run, "eval/loss", x, scale)
    if line is None:
        return None
    colour = ORANGE if alone else run.colour
    return Line(f"{run.label}, validation", colour, line.x, line.y, ":", dots=True)


def _score(run: RunFolder, name: str, factor: float) -> Line | None:
    line = _line(run, name)
    return None if line is None else line._replace(y=line.y * factor, dots=True)


def _of_replicas(run: RunFolder) -> list[Line | None]:
    lines = []
    for k in range(_MOST_REPLICAS):
        name = f"replicas/{k}/loss"
        if run.has(name):
            at, values = run.series(name)
            look = style.look(k)
            lines.append(Line(f"replica {k}", look["color"], at, smoothed(values), look["ls"]))
    return lines


# --- Tables ---------------------------------------------------------------------------------------


def _results(runs: Sequence[RunFolder], states: Sequence[RunState]) -> str:
    scores = [name for name in SCORES if any(run.has(name) for run in runs)]
    head = ["", "state", "steps", "training loss", "validation", "best", "consensus", "sent"]
    rows = [[*head, *(SCORES[name][0].partition(",")[0] for name in scores)]]
    for run, state in zip(runs, states, strict=True):
        numbers = [_last(state, name) for name in ("train/loss", "eval/loss")]
        best = state.best()
        numbers.append("" if best is None else format_number(best, 4))
        sent = run.bytes_sent_per_step
        sent = state.start.get("bytes_sent_per_step") if sent is None else sent
        words = f"{format_bytes(sent)} per step" if isinstance(sent, int | float) else ""
        steps = f"{state.step} of {state.steps}" if state.steps else str(state.step)
        last = [_last(state, name, SCORES[name][1]) for name in scores]
        rows.append([run.label, state.word, steps, *numbers, _last(state, CONSENSUS), words, *last])
    return _table(rows, [run.colour for run in runs])


def _last(state: RunState, name: str, factor: float = 1.0) -> str:
    found = state.last(name)
    return "" if found is None else format_number(factor * found[1], 4)


def _settings(runs: Sequence[RunFolder]) -> list[str]:
    """What differs between the runs; all settings of a single one, folded."""
    configs = [run.config for run in runs]
    names = sorted({name for config in configs for name in config})
    compared = [name for name in names if not set(name.split(".")) & set(IGNORED)]
    if len(runs) == 1:
        rows = [["setting", "value"], *([name, str(configs[0][name])] for name in names)]
        folded = f"<details><summary>{len(names)} settings</summary>{_table(rows)}</details>"
        return ["<h2>Settings</h2>", folded]
    differing = [name for name in compared if len({str(c.get(name)) for c in configs}) > 1]
    rows = [["setting", *(run.label for run in runs)]]
    rows += [[name, *(str(config.get(name, "")) for config in configs)] for name in differing]
    if not differing:
        return ["<h2>Settings</h2>", "<p>All settings are equal.</p>"]
    return ["<h2>Settings that differ</h2>", _table(rows)]


def _times(runs: Sequence[RunFolder], states: Sequence[RunState]) -> list[str]:
    """A bar of the time of each run whose account is known."""
    found = []
    for run, state in zip(runs, states, strict=True):
        if state.spent is None:
            continue
        spent = {cause: max(0.0, state.spent[cause]) for cause in _SPENT}
        total = max(sum(spent.values()), 1e-9)
        label = "" if len(runs) == 1 else f"<b>{_words(run.label)}</b>: "
        found.append(f"<p>{label}{account.describe(spent)}</p>")
        found.append(
            svg.bar(
                [
                    (value / total, _COLOURS[cause], f"{cause}: {format_duration(value)}")
                    for cause, value in spent.items()
                    if value > 0
                ]
            )
        )
    keys = _legend([(colour, cause) for cause, colour in _COLOURS.items()])
    return ["<h2>Where the time went</h2>", *found, keys] if found else []


def _topologies(runs: Sequence[RunFolder]) -> list[str]:
    """The rounds of each schedule of the runs, once."""
    drawn: dict[str, topology.Schedule] = {}
    for run in runs:
        schedule = _schedule(run.config)
        if schedule is not None and 1 < schedule.num_replicas <= _MOST_REPLICAS:
            drawn.setdefault(f"{schedule.name}, {schedule.num_replicas} replicas", schedule)
    return [
        part
        for words, schedule in drawn.items()
        for part in (f"<h2>Who sends to whom: {_words(words)}</h2>", svg.rounds(schedule))
    ]


def _schedule(config: Mapping[str, Any]) -> topology.Schedule | None:
    """The schedule of a config; None for peers, plans, and names that this process cannot make."""
    name, n = config.get("schedule"), config.get("num_replicas")
    if config.get("algorithm") == "all_reduce":
        name = "complete"
    if config.get("peers.use") or config.get("cluster.plan"):
        return None
    if not isinstance(name, str) or not isinstance(n, int) or n > _MOST_REPLICAS:
        return None
    try:
        return topology.make(name, n, local_size=config.get("local_size", 1))
    except (ValueError, TypeError):
        return None


def _incidents(states: Sequence[RunState]) -> list[str]:
    rows = [["what failed"], *([what] for state in states for _, what in state.incidents[-20:])]
    return ["<h2>What failed</h2>", _table(rows)] if len(rows) > 1 else []


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    keys = [f"{_key(colour)}<span>{_words(label)}</span>" for colour, label in entries]
    return f"<p>{''.join(keys)}</p>"


def _key(colour: str) -> str:
    return f'<span class="key" style="background:{colour}"></span>'


def _table(rows: Sequence[Sequence[str]], colours: Sequence[str] = ()) -> str:
    """A table with a head; ``colours`` mark its rows."""
    head = "".join(f"<th>{_words(word)}</th>" for word in rows[0])
    body = ""
    for k, row in enumerate(rows[1:]):
        key = _key(colours[k]) if colours else ""
        cells = [f"{key}{_words(row[0])}", *map(_words, row[1:])]
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _words(text: str) -> str:
    return html.escape(printable(text))
