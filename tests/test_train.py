"""Whole runs: the same numbers wherever replicas live, evaluation, diagnosis, what is left."""

import collections
import itertools
import json
import os
import re
import signal
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from decent_jax import plot, replicas, topology, train
from decent_jax.data.text import token_folder
from decent_jax.models import gpt2
from decent_jax.tasks import language_modeling
from decent_jax.topology import plan_file
from decent_jax.train import TrainingFailed, loop

pytestmark = pytest.mark.usefixtures("compile_once", "no_plot")
slow = pytest.mark.slow


@pytest.fixture
def no_plot(monkeypatch):
    """Curves take a second; one test draws them."""
    monkeypatch.setattr(plot, "plot_runs", lambda paths: None)


@pytest.fixture
def run(tmp_path, tiny_data):
    """Trains the tiny config with changes: (folder, summary)."""

    def run(name, **changes):
        return tmp_path / name, train.run(tiny.config(tiny_data, **changes), tmp_path / name)

    return run


# --- the same numbers wherever the replicas live --------------------------------------------------

LAYOUTS = {
    "1 device": {"devices": 1},
    "2 devices": {"devices": 2},
    "2 devices, one after the other": {"devices": 2, "loop": True},
    "a device each": {"devices": 4},
}
NODES = {"schedule": "alternating_exp_ring"}
CASES = {
    "one_peer_exp": ({}, ["2 devices, one after the other", "a device each"]),
    "nodes of 2": (NODES | {"local_size": 2}, ["2 devices", "a device each"]),
    "complete": ({"schedule": "complete"}, ["a device each"]),
    "all_reduce": ({"algorithm": "all_reduce"}, ["2 devices", "a device each"]),
    "then": ({"combine": "then"}, ["a device each"]),
    "mix_every": ({"mix_every": 3, "schedule": "ring"}, ["a device each"]),
}


def numbers(workdir):
    """What a run measured, without the times."""
    return {
        (row["step"], name): value
        for row in tiny.rows(workdir)
        for name, value in row.items()
        if not name.startswith("perf/")
    }


@slow
@pytest.mark.parametrize("case", CASES)
def test_numbers_do_not_depend_on_the_layout(run, case):
    changes, layouts = CASES[case]
    changes = {"steps": 8, "eval": {"every": 4}} | changes
    folder, _ = run("one", **changes, mesh=LAYOUTS["1 device"])
    wanted = numbers(folder)
    assert len({loss for (_, name), loss in wanted.items() if name == "train/loss"}) == 8
    if case not in ("all_reduce", "complete"):
        assert wanted[8, "train/consensus_distance"] > 1e-3
    for layout in layouts:
        folder, _ = run(layout, **changes, mesh=LAYOUTS[layout])
        got = numbers(folder)
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-5, atol=1e-6, err_msg=str(key))


@slow
def test_all_reduce_keeps_replicas_equal_and_gossip_does_not(run):
    distances = {}
    for algorithm in ("all_reduce", "decentralized_adam", "accum_adam"):
        folder, _ = run(algorithm, algorithm=algorithm, steps=4)
        distances[algorithm] = tiny.rows(folder)[-1]["train/consensus_distance_relative"]
    assert distances["all_reduce"] < 1e-6
    assert distances["decentralized_adam"] > 1e-2 and distances["accum_adam"] > 1e-2


@slow
def test_micro_batches_change_nothing_but_the_memory(run):
    changes = {"steps": 6, "batch_size": 12, "num_replicas": 2, "model": {"dropout": 0.0}}
    whole, _ = run("whole", **changes)
    parts, _ = run("parts", micro_batches=3, **changes)
    np.testing.assert_allclose(tiny.losses(parts), tiny.losses(whole), rtol=2e-5)


def test_mix_every_mixes_in_the_right_steps(run):
    """With rounds of the complete graph, replicas are equal after a mix in the order "then"."""
    folder, _ = run("r", steps=6, mix_every=3, schedule="complete", combine="then")
    distances = [row["train/consensus_distance_relative"] for row in tiny.rows(folder)]
    agree = [distance < 1e-6 for distance in distances]
    assert agree == [False, False, True, False, False, True]


def test_dropout_differs_between_replicas_and_steps(run, monkeypatch):
    """The same data for all, and a learning rate of 0: losses differ by dropout alone."""
    sick_step(monkeypatch, lambda t: range(4))
    folder, _ = run("r", steps=3, learning_rate=0.0)
    seen = [row[f"train/{name}"] for row in tiny.rows(folder) for name in ("loss_min", "loss_max")]
    assert len(set(seen)) == len(seen)


def test_what_a_step_needs_is_said_before_the_first(run, capsys):
    folder, summary = run("r", steps=2)
    said = capsys.readouterr().err
    words = re.search(
        r"a step: (\S+) MB of memory per device \((\S+) of state, (\S+) while it runs", said
    )
    assert words and said.index("a step: ") < said.index("step 1/2")
    memory = summary["memory_bytes_per_device"]
    state = sum(array.nbytes for array in tiny.saved(folder, 2).values())
    assert state <= memory["state"] < 1.1 * state + 10_000 and memory["temporary"] > state / 10


def test_a_trace_of_some_steps(run, capsys):
    folder, _ = run("r", steps=13, profile={"count": 2})
    assert f"a trace of steps 11 to 12 is in {folder / 'profile'}" in capsys.readouterr().err
    [trace] = (folder / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    assert b"forward_backward" in content and b"update" in content


@pytest.mark.parametrize("planned", [False, True])
def test_a_run_is_built_once(run, tmp_path, monkeypatch, planned):
    """The plan file is read once, schedule and transformation are made once."""
    calls = collections.Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    changes = {}
    if planned:
        devices = [f"{socket.gethostname()}/{k}" for k in range(4)]
        schedule = topology.make("ring", 4)
        plan_file.Plan(tuple(devices), schedule, 1).save(tmp_path / "plan.json")
        changes = {"mesh": {"devices": 4}, "cluster": {"plan": str(tmp_path / "plan.json")}}
    count(plan_file, "load")
    count(topology, "make")
    count(loop.algorithm, "transformation")
    run("r", steps=1, **changes)
    wanted = {"make": 1, "transformation": 1}  # a plan names its schedule, which loading it makes
    assert calls == wanted | ({"load": 1} if planned else {})


@slow
def test_learning_goes_down_and_the_seed_matters(run):
    changes = {"steps": 30}
    first, summary = run("a", **changes)
    again, _ = run("b", **changes)
    other, _ = run("c", seed=1, **changes)
    assert summary["final"]["eval/loss"] < 2.8 < 5.3 < tiny.losses(first)[0]
    np.testing.assert_array_equal(tiny.losses(first), tiny.losses(again))
    assert (tiny.losses(first) != tiny.losses(other)).all()


# --- evaluation -----------------------------------------------------------------------------------


class Spy:
    """Keeps the task, and the state at each evaluation."""

    def __init__(self, monkeypatch):
        self.states, self.task = {}, None
        evaluate = loop.evaluate

        def spy(evaluator, state, done, *args):
            self.task = evaluator.task
            self.states[done] = jax.device_get(state)
            evaluate(evaluator, state, done, *args)
            after = jax.device_get(state)
            jax.tree.map(np.testing.assert_array_equal, after, self.states[done])

        monkeypatch.setattr(loop, "evaluate", spy)


def loss_by_hand(task, params):
    """Mean over all validation windows, one batch, no padding."""
    source, model = task.eval_source, task.config
    windows = jnp.asarray(np.stack([source[i] for i in range(len(source))]))
    logits = gpt2.apply(model, params, windows[:, :-1])
    logp = jax.nn.log_softmax(logits)
    return -float(jnp.take_along_axis(logp, windows[:, 1:, None], axis=-1).mean())


@slow
def test_evaluation_equals_evaluating_by_hand(run, monkeypatch):
    spy = Spy(monkeypatch)
    decay = 0.6
    changes = {"eval": {"every": 1, "replicas": True, "ema_decay": decay}, "steps": 4}
    folder, summary = run("r", **changes)
    mean = jax.tree.map(lambda x: x.mean(axis=0), spy.states[4].params)
    row = tiny.rows(folder)[-1]
    assert row["eval/loss"] == pytest.approx(loss_by_hand(spy.task, mean), rel=1e-5)
    assert summary["final"]["eval/loss"] == row["eval/loss"]

    own = [loss_by_hand(spy.task, replicas.take(spy.states[4].params, i)) for i in range(4)]
    assert row["eval/replica_loss_best"] == pytest.approx(min(own), rel=1e-5)
    assert row["eval/replica_loss_worst"] == pytest.approx(max(own), rel=1e-5)
    assert row["eval/replica_loss_mean"] == pytest.approx(np.mean(own), rel=1e-5)
    assert min(own) < max(own)

    # The mean of the replicas' moving averages is the moving average of their mean.
    average = None
    for t in range(5):
        mean = jax.tree.map(
            lambda x: np.asarray(x, np.float64).mean(axis=0),
            spy.states[t].params if t else initial_params(spy.task),
        )
        average = mean if average is None else mix(average, mean, decay)
    saved = jax.tree.map(lambda x: x.mean(axis=0), spy.states[4].ema)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), saved, average)
    average = jax.tree.map(jnp.float32, average)
    assert row["eval/ema_loss"] == pytest.approx(loss_by_hand(spy.task, average), rel=1e-5)
    assert row["eval/ema_loss"] != row["eval/loss"]


def mix(average, new, decay):
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, average, new)


def initial_params(task):
    key = jax.random.key(train.default_config().seed)
    return jax.tree.map(lambda x: np.asarray(x)[None], task.init(key)[0])


def test_evaluation_does_not_disturb_training(run):
    often, _ = run("often", eval={"every": 1, "replicas": True})
    never, _ = run("never")
    np.testing.assert_array_equal(tiny.losses(often), tiny.losses(never))
    tiny.assert_same_state(often, never, 12)


@slow
def test_every_validation_record_counts_once_whatever_the_batch(run):
    """20 windows: batches of 8 and 16 leave a rest, which is padded."""
    changes = {"steps": 1, "learning_rate": 0.0, "eval": {"replicas": True}}
    found = []
    for n, batch, size in [(4, 8, 0), (4, 8, 16), (1, 8, 64)]:
        changes["eval"]["batch_size"] = size
        folder, _ = run(f"{n}-{size}", num_replicas=n, batch_size=batch, **changes)
        row = tiny.rows(folder)[-1]
        found += [row["eval/loss"], row["eval/replica_loss_worst"]]
    np.testing.assert_allclose(found, found[0], rtol=1e-6)


def test_eval_batches_limits_the_records(run):
    changes = {"steps": 1, "learning_rate": 0.0}
    all_of_it, _ = run("all", **changes)
    part, _ = run("part", eval={"batches": 1}, **changes)
    assert tiny.rows(part)[-1]["eval/loss"] != tiny.rows(all_of_it)[-1]["eval/loss"]


# --- replicas that fail ---------------------------------------------------------------------------


@pytest.fixture
def sick_losses(monkeypatch):
    """Sets which windows of data have the loss NaN, by a function of the (B, context) tokens."""
    healthy = language_modeling.LanguageModeling.loss

    def make_sick(is_sick):
        def loss(task, params, model_state, batch, key):
            value, model_state = healthy(task, params, model_state, batch, key)
            return jnp.where(is_sick(batch), jnp.nan, 1.0) * value, model_state

        monkeypatch.setattr(language_modeling.LanguageModeling, "loss", loss)

    return make_sick


def sick_step(monkeypatch, when):
    """The trainer's batches with token 255 everywhere for ``when(step) -> replicas``."""
    batches = loop.loader.train_batches

    class Marked:
        def __init__(self, inner, step):
            self.inner, self.step = inner, step

        def __enter__(self):
            self.inner.__enter__()
            return self

        def __exit__(self, *exc_info):
            return self.inner.__exit__(*exc_info)

        def __next__(self):
            block = np.array(next(self.inner))
            for replica in when(self.step):
                block[replica] = 255
            self.step += 1
            return block

    def marked(*args, start_step=0, **kwargs):
        return Marked(batches(*args, start_step=start_step, **kwargs), start_step)

    monkeypatch.setattr(loop.loader, "train_batches", marked)


def is_marked(batch):
    return (batch == 255).all()


def test_a_replica_with_bad_losses_is_skipped_named_and_recovers(
    run, sick_losses, monkeypatch, capsys
):
    sick_losses(is_marked)
    sick_step(monkeypatch, lambda t: {2: [3], 3: [3, 1], 6: [2]}.get(t, []))
    folder, summary = run("r", log={"every": 2})
    rows = tiny.rows(folder)
    skipped = [row["train/skipped_updates"] for row in rows]
    assert skipped == [0, 3, 3, 4, 4, 4]
    assert all(row["train/loss_min"] <= row["train/loss"] < np.inf for row in rows)
    assert np.isfinite(summary["final"]["eval/loss"])
    for name, value in tiny.saved(folder, 12).items():
        assert np.isfinite(value).all(), name
    said = capsys.readouterr().err
    assert (
        "step 4: 3 updates were not finite and were skipped (replica 3 most); 3 since the start"
        in said
    )
    # the one that failed in these steps, not the one that failed most in all
    assert (
        "step 8: 1 update was not finite and was skipped (replica 2 most); 4 since the start"
        in said.replace("1 updates were not finite and were", "1 update was not finite and was")
    )
    assert said.count("not finite") == 2
    counts = tiny.saved(folder, 12)
    np.testing.assert_array_equal(counts["rest['opt_state']['skipped']"], [0, 1, 1, 2])
    np.testing.assert_array_equal(counts["rest['opt_state']['failing']"], [0, 0, 0, 0])


def test_a_replica_with_bad_parameters_does_not_poison_the_others(run, monkeypatch, capsys):
    """Replica 2 becomes NaN before step 3: it is back after the mix with a neighbour."""
    spoil_once(monkeypatch, 3, lambda x: x.at[2].set(jnp.nan))
    folder, _ = run("r", combine="then")
    rows = tiny.rows(folder)
    assert all(np.isfinite(row["train/loss"]) for row in rows)
    assert all(np.isfinite(row["train/consensus_distance"]) for row in rows)
    assert rows[-1]["train/skipped_updates"] == 1
    assert "step 4: 1 updates were not finite" in capsys.readouterr().err
    for name, value in tiny.saved(folder, 12).items():
        assert np.isfinite(value).all(), name


def spoil_once(monkeypatch, step, change):
    """Changes the parameters before the 0-based ``step``."""
    compile = loop.Programs.compile

    def compile_spoiled(programs, state, batch, *key):
        compile(programs, state, batch, *key)
        program = programs.compiled[key]

        def spoiled(state, batch, t):
            if t == step:
                like = jax.tree.map(lambda x: x.sharding, state.params)
                params = jax.device_put(jax.tree.map(change, state.params), like)
                state = state._replace(params=params)
            return program(state, batch, t)

        programs.compiled[key] = spoiled

    monkeypatch.setattr(loop.Programs, "compile", compile_spoiled)


def test_training_that_fails_everywhere_stops_and_names_the_checkpoint(
    run, sick_losses, monkeypatch, capsys
):
    sick_losses(is_marked)
    sick_step(monkeypatch, lambda t: range(4) if t >= 6 else [0] if t == 5 else [])
    with pytest.raises(TrainingFailed) as failure:
        run("r", steps=40, max_failing_steps=3, checkpoint={"every": 5})
    assert str(failure.value) == (
        "no replica has made a finite update in the last 3 steps, up to step 9; the last "
        "checkpoint is of step 5. Lower the learning rate, or clip gradients (optimizer.clip_norm)"
    )


def test_training_that_fails_at_once_says_that_there_is_no_checkpoint(
    run, sick_losses, monkeypatch, tmp_path
):
    sick_losses(is_marked)
    sick_step(monkeypatch, lambda t: range(4))
    with pytest.raises(TrainingFailed, match="up to step 3; no checkpoint has been saved"):
        run("r", steps=40, max_failing_steps=3)


def test_three_of_four_failing_for_ever_do_not_stop_the_run(run, sick_losses, monkeypatch):
    sick_losses(is_marked)
    sick_step(monkeypatch, lambda t: [0, 1, 3])
    folder, _ = run("r", max_failing_steps=3)
    losses = tiny.losses(folder)
    assert losses[-1] < losses[0] - 0.5


def test_the_bound_on_the_consensus_distance_averages_once_and_says_so(run, monkeypatch, capsys):
    spoil_once(monkeypatch, 4, lambda x: x.at[1].add(3.0))
    changes = {"mix_every": 100, "steps": 8}
    folder, _ = run("bound", max_consensus_distance=1.0, **changes)
    said = capsys.readouterr().err
    assert said.count("all replicas are averaged once") == 1
    assert "step 5: the consensus distance" in said and "is past the bound 1:" in said
    assert "step 5: replica 1 drifts: " in said
    distances = [row["train/consensus_distance_relative"] for row in tiny.rows(folder)]
    assert distances[4] > 1.0 and max(distances[:4] + distances[5:]) < 0.2


def test_a_drifting_replica_is_named(run, monkeypatch, capsys):
    spoil_once(monkeypatch, 4, lambda x: x.at[2].add(1.0))
    run("r", mix_every=100, steps=7)
    said = capsys.readouterr().err
    assert "step 5: replica 2 drifts: " in said
    assert said.count(" drifts: ") == 1  # the rows after it have nothing new to say
    monkeypatch.undo()
    run("not", mix_every=100, steps=6)
    assert " drifts: " not in capsys.readouterr().err


# --- leaving early --------------------------------------------------------------------------------


def send_signal_at(monkeypatch, step, number):
    """This process gets the signal when ``step`` steps are done."""
    due = loop.due

    def with_signal(experiment, saver, signals, done, logs):
        if done == step:
            os.kill(os.getpid(), number)
        return due(experiment, saver, signals, done, logs)

    monkeypatch.setattr(loop, "due", with_signal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves(run, monkeypatch, number):
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    send_signal_at(monkeypatch, 5, number)
    with pytest.raises(train.Interrupted, match="interrupted after step 5; a checkpoint") as left:
        run("r")
    assert left.value.signal == number
    assert handlers == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]


def test_a_signal_in_the_last_step_ends_the_run_as_usual(run, monkeypatch, tmp_path):
    send_signal_at(monkeypatch, 12, signal.SIGTERM)
    _, summary = run("r")
    assert summary["steps"] == 12 and "interrupted" not in summary


def test_a_run_in_a_thread_leaves_signals_alone(run):
    result = []
    thread = threading.Thread(target=lambda: result.append(run("r", steps=1)))
    thread.start()
    thread.join()
    assert result[0][1]["steps"] == 1


# --- what is left behind --------------------------------------------------------------------------


def test_what_a_run_leaves_behind(tmp_path, tiny_data, monkeypatch, capsys):
    monkeypatch.undo()  # the curves are drawn here
    config = tiny.config(tiny_data, eval={"every": 5}, log={"every": 3}, checkpoint={"every": 4})
    summary = train.run(config, tmp_path / "run")
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        ".lock",
        "best",
        "checkpoints",
        "config.json",
        "curves.png",
        "metrics.jsonl",
        "summary.json",
    }
    assert json.loads((folder / "config.json").read_text()) == config.to_dict()
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert tiny.saved_steps(folder) == [8, 12]

    rows = tiny.rows(folder)
    assert [row["step"] for row in rows] == [3, 5, 6, 9, 10, 12]
    trained, evaluated = set(rows[0]), set(rows[1])
    assert trained == {"step"} | {
        *(f"train/{name}" for name in ("loss", "loss_max", "loss_min", "grad_norm")),
        *("train/learning_rate", "train/skipped_updates"),
        *("train/consensus_distance", "train/consensus_distance_relative"),
        *("perf/step_time_s", "perf/tokens_per_s", "perf/data_wait_s", "perf/wall_time_s"),
    }
    assert evaluated == {"step", "eval/loss"} | {
        "eval/consensus_distance",
        "eval/consensus_distance_relative",
    }
    assert set(rows[-1]) == trained | evaluated
    for row in rows[::5]:
        assert row["train/loss_min"] < row["train/loss"] < row["train/loss_max"]
        assert row["perf/step_time_s"] > row["perf/data_wait_s"] >= 0
        tokens = 8 * tiny.CONTEXT
        assert row["perf/tokens_per_s"] == pytest.approx(tokens / row["perf/step_time_s"], rel=1e-3)
    assert rows[0]["train/learning_rate"] == pytest.approx(0.01)
    assert rows[-1]["perf/wall_time_s"] >= 3 * rows[-1]["perf/step_time_s"] > 0

    on_disk = json.loads((folder / "summary.json").read_text())
    assert on_disk == json.loads(json.dumps(summary))
    assert on_disk["final"]["eval/loss"] == rows[-1]["eval/loss"]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert on_disk["best_eval_loss"] == min(losses)
    wanted = {"steps": 12, "num_replicas": 4, "schedule": "one_peer_exp", "algorithm": "accum_adam"}
    assert wanted.items() <= on_disk.items()
    assert on_disk["training_seconds"] > 0 and on_disk["session_seconds"] > 0
    assert on_disk["versions"]["jax"] == jax.__version__ and "cpu" in on_disk["devices"]
    manifest = token_folder.read_manifest(tiny_data)
    assert on_disk["train_tokens"] == manifest["splits"]["train"]["tokens"]

    said = capsys.readouterr()
    assert said.out == "" and str(folder / "curves.png") in said.err
    for words in ("compiling the step (round 1)", "a sample of the consensus model", "step 3/12"):
        assert words in said.err, words


def test_the_learning_rate_that_is_logged_follows_the_schedule(run):
    peak = 0.02
    cosine = {"lr_schedule": {"name": "cosine", "warmup": "25%", "end_factor": 0.5}}
    folder, _ = run("r", learning_rate=peak, **cosine)
    rates = [row["train/learning_rate"] for row in tiny.rows(folder)]
    assert rates[0] < rates[1] < rates[2] < rates[3] == pytest.approx(peak, rel=1e-6)
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))
    assert rates[-1] == pytest.approx(peak / 2, rel=0.1)


def test_epochs_count_steps(run):
    folder, summary = run("r", epochs=0.2, steps=0, eval={"every": "0.1 epochs"})
    assert summary["steps"] == 10  # 400 windows, 8 a step
    assert [row["step"] for row in tiny.rows(folder) if "eval/loss" in row] == [5, 10]
