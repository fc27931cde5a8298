"""Show the progress and the failures of a run, whether or not it is still running.

    decent-jax status RUN [RUN ...] [--json]

RUN is the --workdir of a run of any kind. The command only reads files, so it works on any host
that sees the directory; `watch decent-jax status RUN` repeats it. See docs/status.md.
"""

import shutil
import textwrap
import time
from collections.abc import Iterator

from decent_jax.ground.command_line import Parser, command
from decent_jax.ground.format import format_bytes, format_duration, format_number, printable
from decent_jax.ground.json_files import Json, is_real
from decent_jax.ground.run_folder import SCORES
from decent_jax.monitor import goodput_file, run_state
from decent_jax.monitor.run_state import RunState

_INCIDENTS = 4  # largest number of incidents shown, the newest
_ROWS = 16  # largest number of replicas shown, those with the largest loss
_FEWEST, _ALL = 4, 10**6  # smallest and largest number of rows of a table
_SLOW = 1.5  # a slow process takes more than this many times as long as the fastest
_LABEL = 11  # width of a label, in columns
_SENT = "comm/between_hosts_bytes"


@command("status")
def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = Parser(prog="decent-jax status", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the --workdir of a run")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per run")
    options = parser.parse_args(arguments)
    size = shutil.get_terminal_size((80, _ALL))
    for state in map(run_state.read, options.runs):
        print(run_state.as_json(state) if options.json else "\n".join(screen(state, *size)))
    return 0


def screen(state: RunState, width: int, height: int = 0) -> Iterator[str]:
    """The lines of one run, at most ``width`` columns wide.

    If there are more peers, processes and replicas than fit into ``height`` lines (0: no limit),
    only those that stand out are shown: gone, slow, restarted, then those with the largest loss.
    """
    lines, before, rest = [printable(str(state.path))], "", " " * _LABEL
    for label, words in _lines(state):
        first = ("" if label == before else label).ljust(_LABEL)
        lines += textwrap.TextWrapper(width, first, rest).wrap(printable(words))
        before = label
    yield from lines
    left = max(height - len(lines) - 4, _FEWEST) if height else _ALL  # also for the prompt
    for kind, every_row in _tables(state):
        chosen = sorted(every_row, key=lambda name: _stands_out(name, every_row[name]))[-left:]
        rows = {name: row for name, row in every_row.items() if name in chosen}
        columns = dict.fromkeys(k for row in rows.values() for k, words in row.items() if words)
        cells = [[kind, *columns]]
        cells += [[name, *(row[k] for k in columns)] for name, row in rows.items()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for first, *rest in [[""], *cells] if rows else ():
            others = (f"  {word:>{w}}" for word, w in zip(rest, widths[1:], strict=False))
            yield (first.ljust(widths[0]) + "".join(others)).rstrip()
        if len(every_row) > len(rows):
            yield f"and {len(every_row) - len(rows)} more"
        left = max(left - len(rows) - 2, _FEWEST)


def _stands_out(name: str, row: dict[str, str]) -> tuple[bool, int, float]:
    number = float(row["loss"]) if row.get("loss") else 0.0
    return "slow" in name or row.get("state") == "gone", int(row.get("starts") or 0), number


def _lines(state: RunState) -> Iterator[tuple[str, str]]:
    """(label, words) of each line about which the run has numbers."""
    yield from _progress_lines(state)
    yield from _loss_lines(state)
    yield from _speed_lines(state)
    if state.saved is not None:
        yield "saved", f"checkpoint of step {state.saved}"
    if (skipped := state.last("train/skipped_updates")) and skipped[1]:
        yield "failed", f"{int(skipped[1])} updates were not finite and were skipped"
    newest = {what: date for date, what in state.incidents}  # each once
    shown = sorted((date, what) for what, date in newest.items())[-_INCIDENTS:]
    for date, what in shown:
        yield "failed", f"{format_duration(max(0.0, time.time() - date))} ago: {what}"
    if more := len(state.incidents) - len(shown):
        yield "failed", f"and {more} more in {state.path / goodput_file.INCIDENTS}"


def _progress_lines(state: RunState) -> Iterator[tuple[str, str]]:
    get = state.config.get
    ago = f"{format_duration(max(0.0, time.time() - state.seen))} ago"
    if state.config:
        over = "" if get("algorithm") == "all_reduce" else f" over {get('schedule')}"
        kind = f"{over}, {get('num_replicas')} replicas"
        if get("trainer") == "peers":
            kind = f", {len(state.peers)} peers" if state.peers else ", one of the peers"
        if get("trainer") == "pipelines":
            kind += f" of {get('pipeline.stages')} stages"
        yield "run", f"{get('task')}, {get('algorithm')}{kind}"
    who = f" ({state.owner})" if state.owner else ""
    yield (
        "state",
        {
            "starting": f"starting{who}, nothing to show yet",
            "running": f"running{who}, last sign of life {ago}",
            "silent": f"silent: last sign of life {ago}{who}",
            "stopped": f"stopped before its end {ago}; the same command resumes it",
        }.get(state.word, f"{state.word} {ago}"),
    )
    if state.rows:
        share = f"{state.step / max(state.steps or 1, 1):.0%}"
        done = "" if state.steps is None else f" of {state.steps} ({share})"
        left = state.left_s if state.word == "running" else None
        words = f", about {format_duration(left)} left" if left else ""
        yield "step", f"{state.step}{done}{words}"


def _loss_lines(state: RunState) -> Iterator[tuple[str, str]]:
    losses = {"train/loss": ("in training", 1.0), "eval/loss": ("in validation", 1.0)}
    for name, (title, factor) in {**losses, **SCORES}.items():
        if not (newest := state.last(name)):
            continue
        low, high, best = _number(state, f"{name}_min"), _number(state, f"{name}_max"), newest[1]
        at = f" ({low} to {high} over the replicas)" if low != high else ""
        if name != "train/loss":
            best, at = state.best(name) or 0.0, f" at step {newest[0]}"
        at += f" (best {format_number(factor * best, 4)})" if best != newest[1] else ""
        label = "score" if name in SCORES else "loss"
        yield label, f"{_number(state, name, factor)} {title}{at}"
    if distance := _number(state, "train/consensus_distance_relative"):
        yield "consensus", f"{distance} from the mean model, relative to its norm"


def _speed_lines(state: RunState) -> Iterator[tuple[str, str]]:
    recent = state.recent
    if step_s := recent("perf/step_time_s"):
        words = f"{_ms(step_s)} ms per step"
        for unit in ("tokens", "examples"):
            rate = recent(f"perf/{unit}_per_s")
            words += f", {format_number(rate)} {unit}/s" if rate else ""
        waited, mfu = recent("perf/data_wait_s") or 0, recent("perf/mfu")
        words += f", {_ms(waited)} ms of it waiting for data" if waited > 0.005 * step_s else ""
        yield "speed", words + (f", {mfu:.0%} of the devices' peak" if mfu else "")
    if state.spent is not None and state.rows:
        yield "goodput", goodput_file.describe(state.spent).removeprefix("goodput ")
    known = {**state.summary, **state.start}
    sent, between = (known.get(f"bytes_{name}_per_step") for name in ("sent", "between_hosts"))
    if is_real(sent) and state.rows:
        far = f"; a host sends {format_bytes(between)} to others" if between else ", one host"
        words = f"{format_bytes(sent)} per step from a {'peer' if state.peers else 'replica'}"
        yield "messages", words + (far if is_real(between) else "")
    taken, exposed = _ms(recent("comm/message_s")), _ms(recent("comm/exposed_s"))
    if taken and exposed:
        yield "messages", f"they take {taken} ms, of which {exposed} ms are exposed"


def _number(state: RunState, name: str, factor: float = 1.0) -> str:
    """The newest value of a metric, times a factor; "" if there is none."""
    newest = state.last(name)
    return "" if newest is None else format_number(factor * newest[1], 4)


def _ms(seconds: object) -> str:
    return format_number(1e3 * seconds) if is_real(seconds) else ""


def _tables(state: RunState) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """(kind, rows by name) of processes or workers, peers, and replicas; a row maps column to text.

    A process is slow if it computes for over `_SLOW` times as long as the fastest; a worker's
    waiting does not count.
    """
    kind, computes, waits = "process", "comm/gradient_s", "comm/message_s"
    if state.start.get("stages"):
        kind, computes, waits = "worker", "compute_s", "wait_s"
    peers = {str(rank): peer for rank, peer in state.peers.items()}
    trains = "trains" if state.word in ("running", "silent") else state.word
    for what, entries in ((kind, state.processes), ("peer", peers)):
        taken: Json = {k: e.get("step_s", e.get(computes)) for k, e in entries.items()}
        known = ((k, x) for k, x in taken.items() if x is not None and is_real(x, 1e-9))
        alive = [x for k, x in known if entries[k].get("alive", True)]
        rows: dict[str, dict[str, str]] = {}
        for k, entry in entries.items():
            sent, age, loss = (entry.get(name) for name in (_SENT, "stale", "loss"))
            slow = " (slow)" * (taken[k] in alive and taken[k] > _SLOW * min(alive))
            rows[k + slow] = {
                "host": printable(str(entry.get("host", "")))[:20],
                "state": {"True": trains, "False": "gone"}.get(str(entry.get("alive")), ""),
                "starts": str(entry.get("starts", "")),
                "step": str(entry.get("step", entry.get("steps", ""))),
                "seen": format_duration(time.time() - entry["date"]) if "date" in entry else "",
                "loss": format_number(loss, 4) if is_real(loss) else "",
                "computes, ms": _ms(taken[k]),
                "messages, ms": _ms(entry.get(waits)),
                "sent to others": format_bytes(sent) if is_real(sent) else "",
                "staleness": f"{age:.0f}" if is_real(age) else "",
            }
        yield what, rows
    hosts, count = state.start.get("hosts") or [], min(state.config.get("num_replicas", 0), 1024)
    losses = {k: newest[1] for k in range(count) if (newest := state.last(f"replicas/{k}/loss"))}
    yield (
        "replica",
        {
            str(k): {"host": str(*hosts[k : k + 1])[:20], "loss": format_number(losses[k], 4)}
            for k in sorted(sorted(losses, key=lambda k: -losses[k])[:_ROWS])
        },
    )
