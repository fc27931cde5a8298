"""Show how far a run is, and what goes wrong, also while it runs.

    decent-jax status RUN [RUN ...] [--watch] [--json]

RUN is the --workdir of a run of any kind. Several runs are a table with a line for each. It only
reads files, so it works on any host that sees the folder. docs/status.md explains every line.
"""

import itertools
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from decent_jax.ground import account, run_state
from decent_jax.ground.command_line import Parser, command
from decent_jax.ground.errors import RunError
from decent_jax.ground.format import (
    format_bytes,
    format_duration,
    format_number,
    printable,
    shorten,
)
from decent_jax.ground.json_files import is_real
from decent_jax.ground.run_folder import SCORES
from decent_jax.ground.run_state import RunState, has

_WATCH_S = 2.0
_INCIDENTS = 4  # shown, the newest
_ROWS = 16  # replicas shown, those with the largest loss
_SLOW = 1.5  # times as long as the fastest
_LABEL = 11  # columns
_CLEAR, _HOME, _REST = "\x1b[2J", "\x1b[H", "\x1b[J"


@command("status")
def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = Parser(prog="decent-jax status", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="the --workdir of a run")
    add("--watch", action="store_true", help="show it again every two seconds, until Ctrl-C")
    add("--json", action="store_true", help="a line of JSON per run instead")
    options = parser.parse_args(arguments)
    if options.json:
        print("\n".join(run_state.as_json(run_state.read(run)) for run in options.runs))
    elif options.watch:
        _watch(options.runs)
    else:
        print("\n".join(screen(options.runs, _width())))
    return 0


def _watch(runs: Sequence[str]) -> None:
    """Until Ctrl-C; where there is no terminal, one screen after the other."""
    terminal = sys.stdout.isatty()
    if terminal:
        print(_CLEAR, end="")
    try:
        while True:
            columns, lines = shutil.get_terminal_size()
            shown = screen(runs, columns)
            if terminal:  # each line is cleared behind its end, and all below the last
                shown = [f"{line}\x1b[K" for line in shown[: lines - 1]]
                print(_HOME + "\n".join(shown) + _REST, flush=True)
            else:
                print("\n".join([*shown, ""]), flush=True)
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        print()


def _width() -> int:
    return shutil.get_terminal_size().columns


def screen(runs: Sequence[str], width: int) -> list[str]:
    """The lines for the runs in these folders.

    Raises:
      RunError: a folder that holds no run, where it is the only one.
    """
    if len(runs) == 1:
        return list(of_run(run_state.read(runs[0]), width))
    rows = [["run", "state", "step", "left", "loss", "validation", "consensus", "goodput"]]
    rows[0] += [title.partition(",")[0] for title, _ in SCORES.values()]
    for run in runs:
        try:
            state = run_state.read(run)
        except RunError:
            rows.append([run, "no run", *[""] * (len(rows[0]) - 2)])
        else:
            share = None if state.spent is None else account.shares(state.spent)["goodput"]
            rows.append(
                [
                    run,
                    state.word,
                    f"{state.step}/{state.steps or '?'}",
                    _left(state),
                    _number(state, "train/loss"),
                    _number(state, "eval/loss"),
                    _number(state, "train/consensus_distance_relative"),
                    "" if share is None else f"{share:.0%}",
                    *(_number(state, name, factor) for name, (_, factor) in SCORES.items()),
                ]
            )
    known = [any(column[1:]) for column in zip(*rows, strict=True)]
    rows = [list(itertools.compress(row, known)) for row in rows]
    others = sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[1:])
    longest = max(20, width - others)
    return table([(shorten(printable(run), longest), *row) for run, *row in rows])


def of_run(state: RunState, width: int) -> Iterator[str]:
    """The screen of one run, at most ``width`` columns wide."""
    yield printable(str(state.path))
    for label, words in _lines(state):
        hanging = " " * _LABEL
        yield from textwrap.wrap(
            printable(words), width, initial_indent=label.ljust(_LABEL), subsequent_indent=hanging
        )
    for rows in (_process_rows(state), _peer_rows(state), _replica_rows(state)):
        if len(rows) > 1:
            yield ""
            yield from table(rows)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [word.rjust(w) for word, w in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    ]


# --- Lines ----------------------------------------------------------------------------------------


def _what(state: RunState) -> str:
    """Task, method and replicas."""
    get = state.config.get
    over = "" if get("algorithm") == "all_reduce" else f" over {get('schedule')}"
    kind = f"{get('num_replicas')} replicas"
    if get("peers.use"):
        over, kind = "", f"{len(state.peers)} peers" if state.peers else "one of the peers"
    elif get("pipeline.stages"):
        kind += f" of {get('pipeline.stages')} stages"
    return printable(f"{get('task')}, {get('algorithm')}{over}, {kind}")


def _lines(state: RunState) -> Iterator[tuple[str, str]]:
    """(label, words) of each line for which the run has numbers."""
    if state.config:
        yield "run", _what(state)
    yield "state", _state(state)
    if not state.rows:
        yield from _failures(state)
        return
    yield "step", _progress(state)
    if loss := _loss(state):
        yield "loss", loss
    for name, (title, factor) in SCORES.items():
        if (found := state.last(name)) and (best := state.best(name)) is not None:
            above = f" (best {format_number(factor * best, 4)})" if best > found[1] else ""
            shown = format_number(factor * found[1], 4)
            yield "score", f"{shown} at step {found[0]}{above}: {title}"
    if distance := _number(state, "train/consensus_distance_relative"):
        yield "consensus", f"{distance} from the mean model, relative to its norm"
    if speed := _speed(state):
        yield "speed", speed
    if state.spent is not None:
        yield "goodput", account.describe(state.spent).removeprefix("goodput ")
    if messages := _messages(state):
        yield "messages", messages
    if measured := _measured(state):
        yield "", measured
    if state.saved is not None:
        yield "saved", f"checkpoint of step {state.saved}"
    yield from _failures(state)


def _state(state: RunState) -> str:
    word, who = state.word, f" ({state.owner})" if state.owner else ""
    ago = f"{format_duration(max(0.0, time.time() - state.seen))} ago"
    if word == "starting":
        return f"starting{who} since {ago.removesuffix(' ago')}, nothing to show yet"
    if word == "running":
        return f"running{who}, last sign of life {ago}"
    if word == "silent":
        return f"silent: no sign of life for {ago.removesuffix(' ago')}{who}"
    if word == "stopped":
        return f"stopped before its end {ago}; the same command resumes it"
    return f"{word} {ago}"


def _progress(state: RunState) -> str:
    if state.steps is None:
        return f"{state.step}"
    words = f"{state.step} of {state.steps} ({state.step / max(state.steps, 1):.0%})"
    left = _left(state)
    return f"{words}, about {left} left" if left else words


def _left(state: RunState) -> str:
    """How long the steps that are left take; "" where none are, or nobody knows."""
    left = state.left_s if state.word == "running" else None
    return format_duration(left) if left else ""


def _loss(state: RunState) -> str:
    words = []
    if loss := _number(state, "train/loss"):
        low, high = _number(state, "train/loss_min"), _number(state, "train/loss_max")
        each = f" ({low} to {high} over the replicas)" if low and low != high else ""
        words.append(f"{loss} in training{each}")
    if (found := state.last("eval/loss")) and (best := state.best()) is not None:
        at = f"{format_number(found[1], 4)} in validation at step {found[0]}"
        words.append(at if found[1] <= best else f"{at} (best {format_number(best, 4)})")
    return "; ".join(words)


def _number(state: RunState, name: str, factor: float = 1.0) -> str:
    """The newest value of a metric, times a factor; "" where there is none."""
    found = state.last(name)
    return "" if found is None else format_number(factor * found[1], 4)


def _speed(state: RunState) -> str:
    step_s = state.recent("perf/step_time_s")
    if step_s is None:
        return ""
    words = [f"{format_number(1e3 * step_s)} ms per step"]
    for unit in ("tokens", "examples"):
        if rate := state.recent(f"perf/{unit}_per_s"):
            words.append(f"{format_number(rate)} {unit}/s")
    waited, mfu = state.recent("perf/data_wait_s"), state.recent("perf/mfu")
    if waited and waited > 0.005 * step_s:
        words.append(f"{format_number(1e3 * waited)} ms of it waiting for data")
    if mfu:
        words.append(f"{mfu:.0%} of the devices' peak")
    return ", ".join(words)


def _messages(state: RunState) -> str:
    sent, between = (
        state.start.get(f"bytes_{name}_per_step", state.summary.get(f"bytes_{name}_per_step"))
        for name in ("sent", "between_hosts")
    )
    if not isinstance(sent, int | float):
        return ""
    words = [f"{format_bytes(sent)} per step from a {'peer' if state.peers else 'replica'}"]
    if isinstance(between, int | float):
        far = f"{format_bytes(between)} of a host's go to others" if between else "one host"
        words.append(far)
    return ", ".join(words)


def _measured(state: RunState) -> str:
    """What process 0 measured of its messages."""
    get = state.recent
    inside, between = get("comm/inside_host_bytes"), get("comm/between_hosts_bytes")
    message_s, exposed_s = get("comm/message_s"), get("comm/exposed_s")
    words = []
    if inside is not None and between is not None:
        words.append(
            f"measured on a host: {format_number(inside)}B per step inside it, "
            f"{format_number(between)}B to others"
        )
    if message_s is not None and exposed_s is not None:
        words.append(
            f"messages take {format_number(1e3 * message_s)} ms, of which "
            f"{format_number(1e3 * exposed_s)} ms are not hidden behind the gradient"
        )
    return "; ".join(words)


def _failures(state: RunState) -> Iterator[tuple[str, str]]:
    """Skipped updates, and the newest incidents; the same one again and again is one."""
    skipped, label = state.last("train/skipped_updates"), "failed"
    if skipped and skipped[1]:
        yield label, f"{int(skipped[1])} updates were not finite and were skipped"
        label = ""
    newest: dict[str, float] = {}
    for date, what in state.incidents:
        newest.pop(what, None)
        newest[what] = date
    for what, date in list(newest.items())[-_INCIDENTS:]:
        ago = format_duration(max(0.0, time.time() - date))
        yield label, f"{ago} ago: {what}"
        label = ""
    if more := len(state.incidents) - min(len(newest), _INCIDENTS):
        yield "", f"and {more} more in {state.path / account.INCIDENTS}"


# --- Rows -----------------------------------------------------------------------------------------


def _replica_rows(state: RunState) -> list[tuple[str, ...]]:
    """A row for each replica, those with the largest loss where they are many."""
    count, hosts = state.config.get("num_replicas", 0), state.start.get("hosts") or []
    found = [(k, state.last(f"replicas/{k}/loss")) for k in range(min(count, 1024))]
    losses = sorted(((k, one[1]) for k, one in found if one), key=lambda one: -one[1])[:_ROWS]
    rows = [("replica", "host", "loss")] if losses else []
    for k, loss in sorted(losses):
        host = shorten(str(hosts[k]), 24) if k < len(hosts) else ""
        rows.append((str(k), host, format_number(float(loss), 4)))
    return rows


def _process_rows(state: RunState) -> list[tuple[str, ...]]:
    """A row for each of several processes; who computes longer than the others is slow.

    In pipelines a process is a cell, a stage of a replica, and computes nothing while it waits.
    """
    what, computes, messages = "process", "comm/gradient_s", "comm/message_s"
    if state.start.get("stages"):
        what, computes, messages = "cell", "compute_s", "wait_s"
    rows = [(what, "host", "step", "seen", "gradient, ms", "messages, ms", "sent to others")]
    found = {k: one[computes] for k, one in state.processes.items() if has(one, computes)}
    slow = [k for k, seconds in found.items() if seconds > _SLOW * min(found.values())]
    for k, one in state.processes.items():
        sent = one.get("comm/between_hosts_bytes")
        rows.append(
            (
                f"{k} (slow)" if k in slow else k,
                shorten(printable(str(one.get("host", ""))), 20),
                str(one.get("step", "")),
                f"{format_duration(max(0.0, time.time() - one['date']))} ago",
                _milliseconds(one.get(computes)),
                _milliseconds(one.get(messages)),
                f"{format_number(sent)}B" if is_real(sent) else "",
            )
        )
    return rows


def _milliseconds(seconds: Any) -> str:
    """ "" where they are not known."""
    return format_number(1e3 * seconds) if is_real(seconds) else ""


def _peer_rows(state: RunState) -> list[tuple[str, ...]]:
    rows = [("peer", "state", "starts", "steps", "loss", "ms per step", "age of copies")]
    times = [one["step_s"] for one in state.peers.values() if one["alive"] and one["step_s"]]
    for slot, one in state.peers.items():
        trains = "trains" if state.word in ("running", "silent") else state.word
        word = {True: trains, False: "gone", None: ""}[one["alive"]]
        word = "starts" if one["alive"] and not one["steps"] else word
        slow = one["step_s"] and times and one["step_s"] > _SLOW * min(times)
        rows.append(
            (
                str(slot),
                word + " (slow)" * bool(slow and one["alive"]),
                str(one["starts"]),
                str(one["steps"]),
                "" if one["loss"] is None else format_number(float(one["loss"]), 4),
                _milliseconds(one["step_s"]),
                "" if one["stale"] is None else f"{one['stale']:.0f}",
            )
        )
    return rows
