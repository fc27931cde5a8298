"""What the time of a run is spent on: by hand, over random deaths, and in real runs."""

import itertools
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import psutil
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from toys.waves import Waves

from decent_jax.ground import machine
from decent_jax.monitor import goodput, goodput_file
from decent_jax.monitor.goodput import CAUSES, Clock, Idle
from decent_jax.train import stepper
from decent_jax.train.stepper import Feed

pytestmark = pytest.mark.usefixtures("compile_once")


def nonzero(spent):
    return {cause: seconds for cause, seconds in spent.items() if seconds}


class Moved:
    """A clock and the calendar, which the test moves."""

    def __init__(self, at=0.0):
        self.at = at
        self.clock = Clock(lambda: self.at, lambda: self.at)

    def spend(self, seconds, cause=None):
        if cause is None:
            self.at += seconds
        else:
            with self.clock.of(cause):
                self.at += seconds


def test_each_moment_counts_once_by_hand():
    moved = Moved(5.0)
    moved.spend(3.0)
    moved.clock.waited_for_data(2.0)  # for the first batch: a part of the start
    moved.spend(10.0, "compiling")
    moved.spend(40.0)
    moved.clock.waited_for_data(4.0)
    with moved.clock.of("evaluation"):
        moved.spend(1.0, "checkpoints")
        moved.spend(2.0)
    spent = moved.clock.spent()
    shares = {"steps": 36.0, "start": 3.0, "compiling": 10.0, "data": 4.0}
    assert nonzero(spent) == shares | {"evaluation": 2.0, "checkpoints": 1.0}
    assert goodput_file.shares(spent)["goodput"] == pytest.approx(36 / 56, abs=1e-6)
    assert goodput_file.describe(spent, mfu=0.4) == (
        "goodput 64% of 56.0 s: 18% compiling, 7% data, 5% start, 4% evaluation, 2% checkpoints; "
        "40.0% of the devices' peak (mfu)"
    )


SPAN = st.integers(0, 50)
SESSION = st.fixed_dictionaries(
    {
        "until": SPAN,  # it starts so long after the one before
        "start": SPAN,
        "compiling": SPAN,
        "steps": st.lists(st.tuples(SPAN, SPAN, st.sampled_from("sre ")), max_size=8),
        "ends": st.booleans(),
        "damaged": st.integers(0, 2),  # the newest checkpoints, which cannot be read
    }
)


@given(st.lists(SESSION, min_size=1, max_size=6))
def test_over_sessions_the_sum_is_the_time_and_steps_are_those_that_stayed(sessions):
    """Against a list of all steps made, of which a resume drops the last ones."""
    now, pauses, last, saved, made = 0.0, 0.0, None, [], []
    for session in sessions:
        now += session["until"]
        moved = Moved(now)
        if last is not None and last["ended"]:
            pauses += now - last["date"]
        moved.spend(session["start"])
        del saved[max(0, len(saved) - session["damaged"]) :]
        checkpoint = saved[-1][1] if saved else None
        made = list(saved[-1][0]) if saved else []
        moved.clock.resume(checkpoint, last)
        if last is None:
            pauses = session["until"]
        moved.spend(session["compiling"], "compiling")
        for seconds, waiting, then in session["steps"]:
            moved.spend(seconds + waiting)
            moved.clock.waited_for_data(waiting)
            made.append(seconds)
            if then == "e":
                moved.spend(seconds, "evaluation")
            if then == "s":
                saved.append((list(made), moved.clock.record()))
            last = moved.clock.record()
        spent = moved.clock.spent()
        assert spent["steps"] == sum(made)
        assert sum(spent.values()) == moved.at - pauses
        last = moved.clock.record(session["ends"])
        now = moved.at


def test_a_session_that_begins_before_its_clock():
    assert Clock(lambda: 7.0, began=4.0).spent()["start"] == 3.0
    with goodput.session(100.0), goodput.session():
        assert goodput.session_clock().spent()["start"] >= 100.0
    assert goodput.session_clock().spent()["start"] < 100.0
    by_psutil = time.time() - psutil.Process().create_time()
    assert machine.process_seconds() == pytest.approx(by_psutil, abs=5)


def test_waiting_for_data_while_the_devices_work_costs_nothing():
    now, ended, seen = [0.0], threading.Event(), threading.Event()

    def clock():
        if threading.current_thread() is not threading.main_thread():
            seen.set()
        return now[0]

    with Idle(clock) as idle:
        assert idle.seconds(1.0, 3.0) == 2.0  # nothing has begun
        idle.begin(SimpleNamespace(block_until_ready=ended.wait))
        assert idle.seconds(4.0, 9.0) == 0.0
        now[0] = 11.0
        ended.set()
        assert seen.wait(60)
        idle.begin(jnp.zeros(3))  # read in order, so the first has been noted when this has
        while not idle.seconds(10.0, 15.0):
            pass
        assert (idle.seconds(10.0, 15.0), idle.seconds(12.0, 15.0)) == (4.0, 3.0)


# --- Runs -----------------------------------------------------------------------------------------


def test_goodput_accounts_for_all_of_a_runs_time(tmp_path, monkeypatch):
    """On a clock that goes on by one whenever it is read; little is read after the last record.

    And its mfu, on devices of 1 MFLOP/s.
    """
    monkeypatch.setattr(stepper, "peak", lambda devices: 1e6 * len(list(devices)))
    ticks = itertools.count()
    settings = tiny.waves(eval={"every": 4}, checkpoint={"every": 3}, log={"every": 2})
    folder = tiny.run(settings, tmp_path, clock=Clock(lambda: next(ticks)))
    record = goodput_file.read(folder / goodput_file.FILE)
    assert record is not None and record["ended"]
    assert sum(record["seconds"].values()) == pytest.approx(next(ticks), abs=4)
    for cause in ("steps", "start", "compiling", "evaluation", "checkpoints"):
        assert record["seconds"][cause] > 0, cause
    summary = tiny.summary(folder)["goodput"]
    assert summary["share"] == pytest.approx(
        summary["seconds"]["steps"] / sum(summary["seconds"].values()), abs=1e-5
    )
    rows, causes = tiny.rows(folder), {f"goodput/{cause}" for cause in CAUSES}
    assert [row["step"] for row in rows if "goodput" in row] == [2, 4, 6, 8, 10, 12]
    mfu = {row["perf/step_time_s"]: row["perf/mfu"] for row in rows if "perf/mfu" in row}
    for seconds, found in mfu.items():
        assert found == pytest.approx(Waves.flops_per_example * 8 / seconds / 1e6, rel=1e-5)
    assert min(mfu.values()) <= tiny.summary(folder)["mfu"] <= max(mfu.values())
    explained = [row for row in rows if causes & set(row)]
    assert [row["step"] for row in explained] == [4, 8, 12]
    for row in explained:
        assert row["goodput"] + sum(row[name] for name in causes) == pytest.approx(1, abs=1e-5)


class Killed(BaseException):
    """Ends a run as nothing that it expects."""


@pytest.mark.slow
def test_steps_of_a_killed_session_are_lost_and_the_time_until_the_next_is_recovery(
    tmp_path, monkeypatch
):
    """On a clock by which each step takes ten seconds, and nothing else takes any."""
    batches = Feed.next
    settings = {"checkpoint": {"every": 3}, "log": {"every": 5}}

    def session(date, steps, killed_in=None):
        signals, count = tiny.SignalAfter(-1, 0), iter(range(100))

        def next_batch(feed):
            if next(count) == killed_in:
                raise Killed
            return batches(feed)

        monkeypatch.setattr(Feed, "next", next_batch)
        clock = Clock(lambda: 10.0 * signals.looks, lambda: date + 10.0 * signals.looks)
        tiny.run(tiny.waves(steps=steps, **settings), tmp_path, clock=clock, signals=signals)
        return nonzero(tiny.summary(tmp_path)["goodput"]["seconds"])

    with pytest.raises(Killed):
        session(0.0, 12, killed_in=9)  # after eight steps, the checkpoint is of the sixth
    assert session(1000.0, 12) == {"steps": 120.0, "lost": 20.0, "recovery": 920.0}


# --- The peak of devices --------------------------------------------------------------------------


def test_the_peak_of_devices_by_their_names():
    """Not of parts of one, nor of those that are not in the table."""
    tera = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0, "NVIDIA GH200 480GB": 989.4}
    tera |= {"NVIDIA A10G": 70.0, "NVIDIA L4": 121.0, "NVIDIA L40S": 362.0}
    for kind, wanted in tera.items():
        assert goodput.peak_of(kind) == pytest.approx(1e12 * wanted), kind
    unknown = "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "cpu"
    assert {goodput.peak_of(kind) for kind in unknown} == {None}
    kinds = ["NVIDIA L4", "NVIDIA L40S", "cpu"]
    devices = [SimpleNamespace(device_kind=kind) for kind in kinds]
    assert goodput.peak(devices) is None
    assert goodput.peak(devices[:2]) == pytest.approx(1e12 * 483)
