"""The loop of every kind of run: its rows, also across a resume; and what --check says."""

import os
import queue
import re
import shutil
import signal
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import line_task
import numpy as np
import pytest
import small_runs
import tiny
from refusals import refuses

from decent_jax import train
from decent_jax.cluster import watch
from decent_jax.commands import main as command
from decent_jax.data import loader
from decent_jax.ground import machine
from decent_jax.ground.errors import DataError, Interrupted
from decent_jax.ground.format import format_bytes
from decent_jax.models import decoders, gpt2
from decent_jax.monitor.goodput import Clock
from decent_jax.peers.peer_run import Place, open_peer
from decent_jax.peers.protocol import Averager, Format
from decent_jax.peers.step_boundary import CommonProgress, PeerRunner, StepBoundary, number
from decent_jax.train import ConfigError, TrainingFailed, loop, stepper
from decent_jax.train.config import parse
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.experiment import open_experiment
from decent_jax.train.step import make_step
from decent_jax.train.stepper import Feed, init

pytestmark = pytest.mark.usefixtures("compile_once")


# Rows and checkpoints cut each other.
CUT = {"log": {"every": 5}, "checkpoint": {"every": 3}}


def on_a_clock(folder, until=-1):
    """By which each step takes ten seconds, and a signal as long once more."""
    signals = tiny.SignalAfter(until, signal.SIGTERM)
    clock = Clock(lambda: 10.0 * signals.looks)
    return tiny.run(tiny.waves(**CUT), folder, clock=clock, signals=signals)


def test_step_t_trains_on_batch_t(tmp_path):
    """With a learning rate of 0 a row has the loss of the first parameters on its step's batch."""
    config = tiny.waves(steps=3, learning_rate=0.0, model={"dropout": 0.0})
    got = tiny.losses(tiny.run(config, tmp_path / "run"))
    with open_experiment(parse(config), tmp_path / "other") as (experiment, _):
        params, loss = init(experiment).params, experiment.task.loss
        fed = {"seed": config.seed, "num_replicas": 4, "batch_size": config.batch_size}
        with loader.train_batches(experiment.task.train_source, **fed) as drawn:
            batches = [next(drawn) for _ in range(3)]
        alone = jax.vmap(lambda params, batch: loss(params, {}, batch, jax.random.key(0))[0])
        wanted = [float(alone(params, batch).mean()) for batch in batches]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compile_once):
    """The undisturbed run."""
    return on_a_clock(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("stopped", [8, 10])
def test_a_row_that_a_checkpoint_cuts_is_that_of_the_undisturbed_run(stopped, whole, tmp_path):
    """Its sums travel in the checkpoint, also of a step that had been dispatched last."""
    with pytest.raises(Interrupted):
        on_a_clock(tmp_path / "run", stopped)
    folder = on_a_clock(tmp_path / "run")
    assert [row["step"] for row in tiny.measured(whole)] == [5, 10, 12]
    assert tiny.measured(folder) == tiny.measured(whole)
    for row in tiny.rows(folder):
        assert 9.9 < row["perf/step_time_s"] < 12.1, row["step"]


def test_a_checkpoint_of_before_the_last_row_repeats_it(whole, tmp_path):
    """Killed after step 10 was logged; the newest checkpoint is of step 9."""
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "12")
    tiny.run(tiny.waves(**CUT), folder)
    assert tiny.measured(folder) == tiny.measured(whole)


@pytest.mark.parametrize("every", [6, 0], ids=["in the middle", "at the end"])
def test_a_signal_ends_an_evaluation_and_the_next_session_repeats_it(every, tmp_path, monkeypatch):
    """After two of its many batches; the rows are those of the undisturbed run."""
    config = tiny.waves(eval={"every": every, "batch_size": 4}, log={"every": 3})
    at = every or config.steps
    whole = tiny.run(config, tmp_path / "whole")
    total, batches = Evaluator._total, []

    def counted(self, parts):
        def each():
            for part in parts:
                batches.append(part)
                if len(batches) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield part

        return total(self, each())

    monkeypatch.setattr(Evaluator, "_total", counted)
    with pytest.raises(Interrupted, match=f"after step {at}; a checkpoint is saved"):
        tiny.run(config, tmp_path / "run")
    assert len(batches) == 2 and tiny.saved_steps(tmp_path / "run") == [at]
    assert not any("eval/loss" in row for row in tiny.rows(tmp_path / "run"))
    monkeypatch.setattr(Evaluator, "_total", total)
    tiny.run(config, tmp_path / "run")
    assert tiny.measured(tmp_path / "run") == tiny.measured(whole)
    tiny.assert_same_state(tmp_path / "run", whole, 12)


def test_a_run_begins_before_its_later_rounds_are_compiled(tmp_path, monkeypatch):
    """They wait here until the first step has been made, whose batch is followed by another.

    Processes meet between the compiling of a round and its first step: what one finds in a cache
    another may compile for longer than gloo waits.
    """
    began, batches, make, asked = threading.Event(), Feed.next, stepper.make_step, []
    met, known = [], set()

    def next_batch(feed):
        asked.append(feed)
        if len(asked) == 2:
            began.set()
        return batches(feed)

    def make_gated(*args):
        step = make(*args)

        def lower(*args, round):
            lowered = step.lower(*args, round=round)

            def compiled():
                assert round == 0 or began.wait(60), f"round {round} is compiled before step 0"
                known.add(round)
                return lowered.compile()

            return SimpleNamespace(compile=compiled)

        return SimpleNamespace(lower=lower)

    monkeypatch.setattr(Feed, "next", next_batch)
    monkeypatch.setattr(stepper, "make_step", make_gated)
    monkeypatch.setattr(watch, "barrier", lambda timeout_s: met.append(len(known)))
    tiny.run(tiny.waves(schedule="ring"), tmp_path)
    assert len(met) == len(known) == 2 and met[0] >= 1
    assert tiny.summary(tmp_path)["steps"] == tiny.rows(tmp_path)[-1]["step"]


def test_a_signal_does_not_wait_for_a_round_that_compiles(tmp_path, monkeypatch):
    """Launchers kill half a minute after SIGTERM; the round waits here for the end of the run."""
    ended, make, in_time = threading.Event(), stepper.make_step, []

    def make_gated(*args):
        step = make(*args)

        def lower(*args, round):
            lowered = step.lower(*args, round=round)

            def compiled():
                if round:
                    in_time.append(ended.wait(60))
                return lowered.compile()

            return SimpleNamespace(compile=compiled)

        return SimpleNamespace(lower=lower)

    monkeypatch.setattr(stepper, "make_step", make_gated)
    with pytest.raises(train.Interrupted):
        stops = tiny.SignalAfter(1, signal.SIGTERM)
        tiny.run(tiny.waves(schedule="ring"), tmp_path, signals=stops)
    ended.set()
    assert tiny.saved_steps(tmp_path) == [1] and False not in in_time


def test_a_record_that_cannot_be_used_ends_the_run_behind_the_row_before_it(tmp_path, monkeypatch):
    batches, count = Feed.next, iter(range(100))

    def next_batch(feed):
        if next(count) == 6:
            raise DataError("photo 7 is cut short")
        return batches(feed)

    monkeypatch.setattr(Feed, "next", next_batch)
    with refuses("photo 7", "step 6", error=TrainingFailed):
        tiny.run(tiny.waves(log={"every": 2}), tmp_path / "run")
    assert [row["step"] for row in tiny.rows(tmp_path / "run")] == [2, 4, 6]
    assert tiny.saved_steps(tmp_path / "run") == [6]


@pytest.mark.parametrize(("others", "steps"), [(0, [5, 10, 12]), (4, [5, 8])])
def test_a_peer_keeps_its_last_row(others, steps, tmp_path):
    """Four peers make three steps of the run together: twelve, less what the others have made."""
    config = tiny.waves(algorithm="swarm", trainer="peers", steps=3, log={"every": 5})
    config.optimizer.name = "sgd"
    place = Place(parse(config), str(tmp_path), 0, 0, None, 4, all_steps=others)
    averager = Averager(place.name, Format("float32"), 1.0, 1.0)
    with open_peer(place) as (experiment, work):
        jobs = queue.SimpleQueue()
        given = place, CommonProgress(4, 3), averager, jobs, lambda: None, None
        boundary = StepBoundary(experiment, *given)
        ended = loop.train(PeerRunner(experiment, work, boundary), work)
    assert ended == {"steps": steps[-1], "how": "end"}
    rows = tiny.rows(place.folder)
    assert [row["step"] for row in rows] == steps
    assert all(np.isfinite(row["train/loss"]) for row in rows)
    assert not any("goodput" in row for row in rows)  # its rank may have had other peers
    assert not (place.folder / "goodput.json").exists()


def test_random_numbers_of_a_peer_are_those_of_its_stream_alone(tmp_path):
    """Not those of another stream, however far apart, nor of the next one 2**20 steps earlier."""
    config = tiny.waves(algorithm="swarm", trainer="peers", model={"dropout": 0.5})
    config.optimizer.name = "sgd"
    with open_peer(Place(parse(config), str(tmp_path), 0, 0, None, 4)) as (
        experiment,
        _,
    ):
        step = make_step(
            experiment.config,
            experiment.task,
            experiment.tx,
            experiment.rate,
            experiment.schedule,
            experiment.placement,
        )
        state = init(experiment)
        batch = experiment.placement.put(np.ones((1, 2, 2), np.float32))
        losses = {
            (stream, t): float(
                step(jax.tree.map(jnp.copy, state), batch, number(stream, t), round=0)[1]["loss"][0]
            )
            for stream, t in [(0, 5), (2048, 5), (1, 0), (0, 2**20)]
        }
    assert len(set(losses.values())) == 4, losses


# --- --check: what each kind of run takes; nothing is left behind ---------------------------------


def test_it_says_what_a_run_takes_and_leaves_nothing(tiny_data, tmp_path, capsys, monkeypatch):
    path = tiny.write_config(tmp_path / "tiny_config.py", tiny_data)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert command.main(["train", "--config", str(path), "--check", "--config.batch_size=9"]) == 2
    assert "batch_size" in capsys.readouterr().err
    assert command.main(["train", "--config", str(path), "--check"]) == 0
    said = capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    assert "the config is valid: 12 steps, 2 rounds to compile" in said
    (ms,) = re.findall(r"a step takes (\S+) ms here, all steps take \S+ s", said)
    assert 0 < float(ms) < 60_000
    (kept,) = re.findall(r"keeps (\S+) MB of parameters and optimizer", said)
    (state,) = re.findall(r"a step: .* MB of memory per device \((\S+) of state", said)
    assert float(state) == pytest.approx(4 * float(kept), rel=0.02)  # of four replicas, and a batch
    flops, sent = re.findall(r"(\S+) GFLOP of the model and (.*) sent per replica", said)[0]
    model = gpt2.GPT2Config(256, tiny.CONTEXT, layers=1, heads=2, width=16, bias=False)
    wanted = 2 * tiny.CONTEXT * decoders.flops_per_token(model, tiny.CONTEXT) / 1e9
    assert float(flops) == pytest.approx(wanted, rel=1e-2)
    assert sent == format_bytes(4 * decoders.num_params(model))


def test_both_kinds_of_step_are_compiled_and_weighted(capsys):
    """With mix_every=4, three of four steps send nothing."""
    train.dry_run(tiny.waves(mix_every=4))
    said = capsys.readouterr().err
    assert "compiling the step (round 0)" in said
    assert "compiling the step (without communication)" in said
    mean, sends, silent = map(
        float, re.findall(r"takes (\S+) ms .*\((\S+) ms with .* (\S+) ms without\)", said)[0]
    )
    assert mean == pytest.approx((sends + 3 * silent) / 4, rel=0.02)  # printed with three digits


def test_a_peer_is_tried_with_its_share_of_the_batch(capsys):
    config = tiny.waves(algorithm="swarm", trainer="peers", steps=100)
    config.optimizer.name = "sgd"
    train.dry_run(config)
    said = capsys.readouterr().err
    assert "over peers" in said and "the config is valid: 100 steps" in said


def test_only_a_peers_own_batch_must_fit_into_its_memory(tmp_path, monkeypatch):
    """Four peers share 400 examples of 8 bytes; with one batch read ahead each holds two."""
    config = tiny.waves(algorithm="swarm", trainer="peers", num_replicas=4, batch_size=400)
    config.optimizer.name, config.data.prefetch = "sgd", 1
    needed = []
    monkeypatch.setattr(machine, "check_memory", lambda size, what: needed.append((size, what)))
    with open_peer(Place(parse(config), str(tmp_path), 0, 0, None, 4)) as (
        experiment,
        _,
    ):
        assert experiment.config.batch_size == 100
    assert [size for size, what in needed if "batch_size" in what] == [2 * 100 * 8]


def test_a_state_that_does_not_fit_is_refused_before_it_is_allocated(tiny_data, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 50 if "PAGES" in name else 4096)
    with refuses("4 replicas", "205kB", error=ConfigError):
        train.dry_run(tiny.config(tiny_data))


def test_a_source_that_raises_late_costs_no_step(tmp_path, monkeypatch):
    """Whatever it raises: the state is saved, and the same command goes on from there."""
    good, bad = line_task.Points.__getitem__, {"at": 80}

    def read(self, index):
        bad["at"] -= 1
        if not bad["at"]:
            raise KeyError("row 7 of the user's table")
        return good(self, index)

    config = small_runs.config("line_task", steps=30)
    config.data.prefetch = 1
    monkeypatch.setattr(line_task.Points, "__getitem__", read)
    with refuses("row 7", "test_loop.py, line", "from the checkpoint", error=TrainingFailed):
        tiny.run(config, tmp_path)
    [step] = tiny.saved_steps(tmp_path)
    assert 0 < step < 30 and len(tiny.rows(tmp_path)) == step
    tiny.run(config, tmp_path)
    assert tiny.saved_steps(tmp_path)[-1] == 30
