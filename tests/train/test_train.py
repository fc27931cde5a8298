"""Whole runs: the same numbers wherever replicas live, evaluation, diagnosis, what is left."""

import collections
import itertools
import json
import re
import signal
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from refusals import refuses
from toys.waves import Waves
from trees import assert_equal

from decent_jax import train
from decent_jax.commands import sample
from decent_jax.data.text import token_folder
from decent_jax.ground import machine
from decent_jax.models import decoders
from decent_jax.monitor import goodput_file
from decent_jax.plots import runs as plot
from decent_jax.train import TrainingFailed, saved_model
from decent_jax.train.step import gradient
from decent_jax.train.stepper import Feed, Programs
from decent_jax.train.synchronous import Synchronous

pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture
def run(tmp_path):
    """Trains `tiny.waves` with changes; returns the folder."""

    def run(name="run", signals=None, **changes):
        changes = {"schedule": "bidirectional_ring"} | changes  # one round to compile
        of_loop = {"signals": signals} if signals else {}
        return tiny.run(tiny.waves(**changes), tmp_path / name, **of_loop)

    return run


# --- the same numbers wherever the replicas live --------------------------------------------------

LAYOUTS = {
    "2 devices": {"devices": 2},
    "2 devices, one after the other": {"devices": 2, "sequential_replicas": True},
    "a device each": {"devices": 4},
}
CASES = {
    "one_peer_exp": ({"schedule": "one_peer_exp"}, "2 devices, one after the other"),
    "all_reduce": ({"algorithm": "all_reduce"}, "2 devices"),
    "atc": ({"combine": "atc", "mix_every": 3, "schedule": "ring"}, "a device each"),
}


def numbers(workdir):
    """What a run measured, without the times."""
    rows = tiny.measured(workdir)
    return {(row["step"], name): value for row in rows for name, value in row.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_numbers_do_not_depend_on_the_layout(run, case):
    changes, layout = CASES[case]
    changes = {"steps": 6, "eval": {"every": 3}} | changes
    wanted = numbers(run("one", **changes))
    assert len({loss for (_, name), loss in wanted.items() if name == "train/loss"}) == 6
    distance = max(wanted[t, "train/consensus_distance_relative"] for t in range(1, 7))
    assert distance < 1e-6 if case == "all_reduce" else distance > 1e-4
    got = numbers(run(layout, **changes, mesh=LAYOUTS[layout]))
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-5, atol=1e-6, err_msg=str(key))


def test_micro_batches_change_nothing_but_the_memory(run):
    changes = {"steps": 6, "batch_size": 12, "num_replicas": 2, "model": {"dropout": 0.0}}
    whole, parts = run("whole", **changes), run("parts", micro_batches=3, **changes)
    np.testing.assert_allclose(tiny.losses(parts), tiny.losses(whole), rtol=2e-5)


def test_micro_batches_draw_random_numbers_of_their_own():
    """The gradient of ``w u`` is u, a number of the key; here the mean over four."""

    def loss(params, state, batch, key):
        return params["w"] * jax.random.uniform(key), state

    key, batch = jax.random.key(0), {"x": jnp.zeros((8, 1))}
    grads = gradient(loss, 4, {"w": jnp.float32(2)}, {}, batch, key)[2]
    drawn = [jax.random.uniform(jax.random.fold_in(key, k)) for k in range(4)]
    assert float(grads["w"]) == pytest.approx(np.mean(drawn))


def test_mix_every_mixes_in_the_right_steps(run):
    """With rounds of the complete graph, replicas are equal after a mix in the order "atc"."""
    folder = run(steps=6, mix_every=3, schedule="complete", combine="atc")
    distances = [row["train/consensus_distance_relative"] for row in tiny.rows(folder)]
    agree = [distance < 1e-6 for distance in distances]
    assert agree == [False, False, True, False, False, True]


def test_dropout_differs_between_replicas_and_steps(run, monkeypatch):
    """The same data for all, and a learning rate of 0: losses differ by dropout alone."""
    mark_batches(monkeypatch, lambda t: range(4))
    rows = tiny.rows(run(steps=3, learning_rate=0.0))
    seen = [row[f"train/{name}"] for row in rows for name in ("loss", "loss_min", "loss_max")]
    assert len(set(seen)) == len(seen)


def test_a_trace_of_some_steps(run, capsys):
    folder = run(steps=13, profile={"count": 2})
    assert f"a trace of steps 11 to 12 is in {folder / 'profile'}" in capsys.readouterr().err
    [trace] = (folder / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    assert b"forward_backward" in content and b"update" in content


# --- evaluation -----------------------------------------------------------------------------------


def loss_by_hand(task, params):
    """Mean squared error over all validation points, in one batch without padding."""
    x, y = task.eval_source.points.T.astype(np.float64)
    predicted = params["slope"] * x + np.tanh(np.outer(x, params["in"])) @ params["out"]
    return np.square(predicted - y).mean()


def test_evaluation_equals_evaluating_by_hand(run, monkeypatch):
    states, tasks, evaluate = {}, [], Synchronous.evaluate

    def spy(runner, pause):
        tasks.append(runner.experiment.task)
        before = states[len(tasks)] = jax.device_get(runner.state)
        found = evaluate(runner, pause)
        assert_equal(jax.device_get(runner.state), before)
        return found

    monkeypatch.setattr(Synchronous, "evaluate", spy)
    folder = run(eval={"every": 2}, steps=4)
    task, row = tasks[0], tiny.rows(folder)[-1]
    mean = jax.tree.map(lambda x: x.mean(axis=0), states[2].params)
    assert row["eval/loss"] == pytest.approx(loss_by_hand(task, mean), rel=1e-5)
    assert tiny.summary(folder)["final"]["eval/loss"] == row["eval/loss"]


def test_validation_in_other_batches_or_of_some_alone(run):
    """20 records: batches of 8 leave a rest, which is padded; one of 64 holds them all."""
    evals = {"batch_size": 0}, {"batch_size": 64}, {"batches": 1}
    folders = [run(f"{k}", steps=1, eval=own) for k, own in enumerate(evals)]
    whole, other, part = (tiny.rows(folder)[-1]["eval/loss"] for folder in folders)
    assert other == pytest.approx(whole, rel=1e-6) and part != pytest.approx(whole, rel=1e-3)


# --- replicas that fail ---------------------------------------------------------------------------

MARK = 255.0


def mark_batches(monkeypatch, when):
    """The trainer's batches are `MARK` everywhere for ``when(step) -> replicas``."""
    next_batch, counts = Feed.next, collections.Counter()

    def marked(feed):
        batch, measured = next_batch(feed)
        block = np.array(batch)
        block[list(when(counts[feed]))] = MARK
        counts[feed] += 1
        return jax.device_put(block, batch.sharding), measured

    monkeypatch.setattr(Feed, "next", marked)


@pytest.fixture
def sick(monkeypatch):
    """Sets which replicas have the loss NaN, by a function of the step."""
    healthy = Waves.loss

    def loss(task, params, model_state, batch, key):
        value, model_state = healthy(task, params, model_state, batch, key)
        return jnp.where((batch == MARK).all(), jnp.nan, 1.0) * value, model_state

    monkeypatch.setattr(Waves, "loss", loss)
    return lambda when: mark_batches(monkeypatch, when)


def test_a_replica_with_bad_losses_is_skipped_named_and_recovers(run, sick, capsys):
    bad = {2: [3], 3: [0, 1, 3], 6: [2]}
    sick(lambda t: bad.get(t, []))
    folder = run(log={"every": 2})
    rows = tiny.rows(folder)
    skipped = [row["train/skipped_updates"] for row in rows]
    assert skipped == [0, 4, 4, 5, 5, 5]
    assert all(row["train/loss_min"] <= row["train/loss"] < np.inf for row in rows)
    assert np.isfinite(rows[-1]["eval/loss"])
    counts = tiny.saved(folder, 12)
    assert all(np.isfinite(value).all() for value in counts.values())
    said = capsys.readouterr().err
    assert re.search(r"step 4: 4 updates were not finite .*\(most on replica 3\); 4 since", said)
    # the one that failed in these steps, not the one that failed most in all
    assert re.search(r"step 8: 1 updates were not finite .*\(most on replica 2\); 5 since", said)
    assert said.count("not finite") == 2
    np.testing.assert_array_equal(counts["rest.opt_state.skipped"], [1, 1, 1, 2])
    np.testing.assert_array_equal(counts["rest.opt_state.failing"], [0, 0, 0, 0])
    # A row has the mean of the finite losses of its steps.
    each = tiny.losses(run("each"))
    fine = [4 - len(bad.get(t, [])) for t in range(12)]
    means = [np.average(each[t : t + 2], weights=fine[t : t + 2]) for t in range(0, 12, 2)]
    np.testing.assert_allclose(tiny.losses(folder), means, rtol=1e-5)


def spoil_once(monkeypatch, step, change):
    """Changes the parameters before the 0-based ``step``."""
    compile = Programs.compile

    def compile_spoiled(programs, state, batch, *key, soon=()):
        compile(programs, state, batch, *key, soon=soon)
        program = programs.compiled[key]

        def spoiled(state, batch, t):
            if t == step:
                like = jax.tree.map(lambda x: x.sharding, state.params)
                params = jax.device_put(jax.tree.map(change, state.params), like)
                state = state._replace(params=params)
            return program(state, batch, t)

        programs.compiled[key] = spoiled

    monkeypatch.setattr(Programs, "compile", compile_spoiled)


def test_a_replica_with_bad_parameters_does_not_poison_the_others(run, monkeypatch, capsys):
    """Replica 2 becomes NaN before step 3: it is back after the mix with a neighbour."""
    spoil_once(monkeypatch, 3, lambda x: x.at[2].set(jnp.nan))
    folder = run(combine="atc", steps=6)
    rows = tiny.rows(folder)
    assert all(np.isfinite(row["train/loss"]) for row in rows)
    assert all(np.isfinite(row["train/consensus_distance"]) for row in rows)
    assert rows[-1]["train/skipped_updates"] == 1
    assert "step 4: 1 updates were not finite" in capsys.readouterr().err
    for name, value in tiny.saved(folder, 6).items():
        assert np.isfinite(value).all(), name


def test_training_that_fails_everywhere_stops_and_names_the_checkpoint(run, sick):
    sick(lambda t: range(4) if t >= 6 else [0] if t == 5 else [])
    with refuses("step 26", "step 25", error=TrainingFailed):
        run(steps=40, checkpoint={"every": 5})


def test_three_of_four_failing_for_ever_do_not_stop_the_run(run, sick):
    sick(lambda t: [0, 1, 3])
    losses = tiny.losses(run(steps=24, learning_rate=0.1))
    assert losses[-1] < losses[0] / 2


# --- leaving early --------------------------------------------------------------------------------


def test_a_signal_saves_and_leaves(run, tmp_path):
    """In the last step it leaves the evaluation to the next session.

    It may take longer than a scheduler waits before it kills. test_checkpoint stops earlier.
    """
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(train.Interrupted) as left:
        run(steps=5, signals=tiny.SignalAfter(5, signal.SIGTERM))
    assert left.value.code == 143 and "step 5" in str(left.value)
    assert goodput_file.read(tmp_path / "run" / goodput_file.FILE)["ended"]  # as it should
    assert handlers == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    summary = tiny.summary(run(steps=5))
    assert summary["steps"] == 5 and "interrupted" not in summary
    assert summary["final"]["step"] == 5


def test_a_run_in_a_thread_leaves_signals_alone(run):
    result = []
    thread = threading.Thread(target=lambda: result.append(run(steps=1)))
    thread.start()
    thread.join()
    assert tiny.summary(result[0])["steps"] == 1


# --- what is left behind --------------------------------------------------------------------------


def lm_loss_by_hand(model, windows):
    """Mean over all windows of the next token's cross entropy, in one batch."""
    windows = jnp.asarray(np.stack([windows[i] for i in range(len(windows))]))
    logits = jax.jit(decoders.apply, static_argnums=0)(model.config, model.params, windows[:, :-1])
    logp = jax.nn.log_softmax(logits)
    return -float(jnp.take_along_axis(logp, windows[:, 1:, None], axis=-1).mean())


@pytest.mark.slow
def test_what_a_run_leaves_behind(tmp_path, tiny_data, capsys, monkeypatch):
    """The one run of this file that trains a language model, and draws its curves."""
    every = {"eval": {"every": 5}, "log": {"every": 3}, "checkpoint": {"every": 4}}
    config = tiny.config(tiny_data, schedule="complete", model={"dropout": 0.0}, **every)
    folder = tmp_path / "run"
    summary = train.run(config, folder)
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
        *(f"replicas/{k}/loss" for k in range(4)),
        "goodput",
    }
    distances = {"eval/consensus_distance", "eval/consensus_distance_relative"}
    spent = {"goodput"} | {f"goodput/{cause}" for cause in goodput_file.CAUSES}
    assert evaluated == {"step", "eval/loss"} | distances | spent
    assert set(rows[-1]) == trained | evaluated
    for row in rows[::5]:
        tokens = 8 * tiny.CONTEXT
        assert row["perf/tokens_per_s"] == pytest.approx(tokens / row["perf/step_time_s"], rel=1e-3)
    assert rows[0]["train/learning_rate"] == pytest.approx(0.01)

    on_disk = tiny.summary(folder)
    assert on_disk == json.loads(json.dumps(summary))
    assert on_disk["final"]["eval/loss"] == rows[-1]["eval/loss"]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert on_disk["best_eval_loss"] == min(losses)
    wanted = {"steps": 12, "num_replicas": 4, "schedule": "complete", "algorithm": "accum_adam"}
    assert (wanted | {"partition": {"name": "iid"}}).items() <= on_disk.items()
    assert on_disk["training_seconds"] > 0 and on_disk["session_seconds"] > 0
    assert on_disk["versions"]["jax"] == jax.__version__ and "cpu" in on_disk["devices"]
    manifest = token_folder.read_manifest(tiny_data)
    for name in ("train", "val"):
        assert on_disk[f"{name}_tokens"] == manifest["splits"][name]["tokens"]
    assert on_disk["tokenizer"] == "bytes"

    # the model that is loaded is the one that was evaluated
    windows = token_folder.TokenWindows(tiny_data / "val.bin", tiny.CONTEXT)
    by_hand = lm_loss_by_hand(saved_model.load(folder), windows)
    assert on_disk["final"]["eval/loss"] == pytest.approx(by_hand, rel=1e-5)

    started = json.loads((folder / "run.json").read_text())
    begun = {"steps": 12, "unit": "tokens", "hosts": [socket.gethostname()] * 4, "processes": 1}
    sent = round(4 * on_disk["parameters"] * 2 * 3 / 4)
    begun |= {"bytes_sent_per_step": sent, "bytes_between_hosts_per_step": 0}
    assert started.items() >= begun.items() and time.time() - 600 < started["began"] < time.time()
    said = capsys.readouterr()
    assert f"validation loss {losses[-1]:.4f} after 12 steps, " in said.err
    assert said.out == "" and str(folder / "curves.png") in said.err
    for words in ("compiling the step (round 0)", "a sample of the consensus model", "step 3/12"):
        assert words in said.err, words
    assert said.err.index("a step: ") < said.err.index("step 3/12")
    given, needed = [], []

    def generate(config, params, prompts, *numbers):
        given.extend([*prompts.tolist(), numbers[0], jax.random.key_data(numbers[1])[-1]])
        given.extend(numbers[2:])
        return np.column_stack([prompts, np.tile([ord("!"), 256], (2, 1))])

    monkeypatch.setattr(decoders, "generate", generate)
    monkeypatch.setattr(machine, "check_memory", lambda size, what: needed.append(size))
    asked = "--tokens=3 --samples=2 --temperature=0.5 --top_k=5 --seed=7 --prompt=to"
    assert sample.main(["--workdir", str(folder), *asked.split()]) == 0
    assert capsys.readouterr().out == 2 * f"to!\n{80 * '-'}\n"
    assert given == [[0, *b"to"]] * 2 + [3, 7, 0.5, 5]
    assert needed == [2 * (4 * 2 * 16 * 3 + 4 * (3 + 256))]  # keys and values, tokens and logits
    memory = on_disk["memory_bytes_per_device"]
    state = sum(array.nbytes for array in tiny.saved(folder, 12).values())
    assert state <= memory["state"] < 1.1 * state + 10_000 and memory["temporary"] > state / 10


def test_curves_that_cannot_be_drawn_cost_no_run(tmp_path, capsys, monkeypatch):
    """matplotlib raises this where MPLBACKEND names no backend of it."""

    def refuse(paths):
        raise ValueError("'nosuch' is not a valid value for backend")

    monkeypatch.setattr(plot, "plot_runs", refuse)
    train.run(tiny.waves(steps=2), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert "'nosuch'" in capsys.readouterr().err


def test_the_learning_rate_that_is_logged_follows_the_schedule(run):
    """And epochs count steps: of 400 points, 8 a step."""
    cosine = {"lr_schedule": {"name": "cosine", "warmup": "30%", "end_factor": 0.5}}
    folder = run(learning_rate=0.02, epochs=0.2, steps=0, eval={"every": "0.1 epochs"}, **cosine)
    rows = tiny.rows(folder)
    rates = [row["train/learning_rate"] for row in rows]
    assert rates[0] < rates[1] < rates[2] < rates[3] == pytest.approx(0.02, rel=1e-6)
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))
    assert rates[-1] == pytest.approx(0.01, rel=0.1)
    assert tiny.summary(folder)["steps"] == len(rows) == 10
    assert [row["step"] for row in rows if "eval/loss" in row] == [5, 10]
