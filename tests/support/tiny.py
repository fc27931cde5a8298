"""Runs small enough to test with: a model of some thousand parameters on a few kilobytes of text.

>>> config("DATA", steps=5, model={"dropout": 0.1}).model.dropout
0.1
"""

import contextlib
import copy
import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from decent_jax import train
from decent_jax.cpu import gloo
from decent_jax.data.text import token_folder, tokenizers
from decent_jax.optim import METHODS
from decent_jax.plots import runs as plot
from decent_jax.train import algorithm, loop, stepper, synchronous
from decent_jax.train.config import parse
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.experiment import open_experiment
from decent_jax.train.signals import Signals
from decent_jax.train.synchronous import Synchronous

CONTEXT = 8


def write_data(folder: Path) -> Path:
    """A prepared folder of bytes: 400 training windows and 20 of validation."""
    words = np.random.default_rng(0).choice(["to", "be", "or", "not", "that", "is"], 2000)
    text = " ".join(words)
    tokenizer = tokenizers.load("bytes")
    with token_folder.TokenFolderWriter(folder, tokenizer) as writer:
        writer.add("train", tokenizer.encode(text[: 400 * CONTEXT]))
        writer.add("val", tokenizer.encode(text[-20 * CONTEXT :]))
        writer.commit()
    return folder


def config(data, **changes):
    """4 replicas for 12 steps; ``changes`` are fields, or dicts of fields for a section."""
    result = train.default_config()
    result.data.path = str(data)
    result.model.update(
        {"layers": 1, "heads": 2, "width": 16, "context": CONTEXT, "bias": False},
        dtype="float32",
        dropout=0.1,  # so that the random state matters
    )
    return _with_settings(result, changes)


def waves(**changes):
    """`config` for the task `toys.waves`, whose steps compile in a tenth of the time."""
    return _with_settings(train.default_config("toys.waves"), changes)


def _with_settings(result, changes):
    result.num_replicas = 4
    result.batch_size = 8
    result.steps = 12
    result.learning_rate = 1e-2
    result.optimizer.accum_steps = 3
    result.lr_schedule.update(name="constant", warmup=2)  # compiled alike for any number of steps
    result.optimizer.weight_decay = 0.1
    result.optimizer.clip_norm = 1.0
    result.mesh.devices = 1
    result.eval.every = 0
    result.checkpoint.every_minutes = 0.0
    result.log.every = 1
    for name, value in changes.items():
        if isinstance(value, dict):
            result[name].update(value)
        else:
            result[name] = value
    return result


# The curves would take a third of a process that makes a few steps.
CONFIG_FILE = """
import sys, types
sys.path.insert(0, {folder!r})
if "pytest" not in sys.modules:
    sys.modules["decent_jax.plots.runs"] = types.SimpleNamespace(plot_runs=lambda paths: None)

def get_config():
    from ml_collections import ConfigDict
    from decent_jax import train
    config = train.default_config({task!r})
    config.update(ConfigDict({fields!r}))
    return config
"""


def write_config(path: Path, data: Path | None = None) -> Path:
    """``config(data)``, or `waves` without data, as a file for the command line."""
    return write(config(str(data)) if data else waves(), path)


def write(config, path: Path) -> Path:
    """A config as a file; it imports no test, so that a process that reads it starts soon."""
    folder = str(Path(__file__).parent)
    path.write_text(CONFIG_FILE.format(folder=folder, task=config.task, fields=config.to_dict()))
    return path


def run(config, folder: Path, **of_loop) -> Path:
    """Train without drawing curves, which takes a second; returns the folder.

    With a clock or signals `of_loop`, replicas that step together train by them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "plot_runs", lambda paths: None)
        if not of_loop:
            train.run(config, folder)
            return folder
        patch.setattr(loop, "Pause", UncountedPause)
        with open_experiment(parse(config), folder) as (experiment, work):
            loop.train(Synchronous(experiment, work), work, **of_loop)
    return folder


# Sections of a config, and single fields, that no step of a run depends on.
NOT_OF_STEPS = "checkpoint cluster eval log recovery"
_shared: dict[tuple, Any] = {}


def _once(make: Callable, what: str, config, *kept):
    """What ``make()`` made for the first of all runs whose steps are alike."""
    told = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_OF_STEPS.split()}
    if config.lr_schedule.name == "constant":
        del told["steps"]
    if config.task == "toys.waves":
        del told["data"]  # from which another task may read how to augment images
    key = what, json.dumps(told, sort_keys=True), gloo.used(), METHODS[config.algorithm], *kept
    if key not in _shared:
        _shared[key] = make()
    return _shared[key]


def _rounds(schedule):
    """A plan may bring its own."""
    return schedule.name, *(one.matrix.tobytes() for one in schedule.rounds)


def _devices(placement):
    return tuple(placement.mesh.devices.flat)


@contextlib.contextmanager
def sharing():
    """Runs that are alike trace their functions once, which takes two thirds of a tiny one."""
    build, make_step, init = algorithm.transformation, stepper.make_step, stepper.init

    def transformation(config, schedule, rate, mask=None, *axis):
        kept = getattr(mask, "__func__", mask), *axis, _rounds(schedule)
        made = partial(build, config, schedule, rate, mask, *axis)
        return _once(made, "method", config, *kept) if callable(rate) else made()

    def shared_step(config, task, tx, rate, schedule, placement, *kept):
        kept += type(task).loss, _rounds(schedule), _devices(placement)
        made = partial(make_step, config, task, tx, rate, schedule, placement, *kept[:-3])
        return _once(made, "step", config, *kept)

    def shared_init(experiment):
        config, task, *_ = experiment
        kept = type(task).init, _rounds(experiment.schedule), _devices(experiment.placement)
        if task.load_params() is not None:
            return init(experiment)
        return _once(lambda: jax.jit(lambda: init(experiment)), "init", config, *kept)()

    def evaluator(config, task, placement):
        made = partial(Evaluator, config, task, placement)
        found = copy.copy(
            _once(made, "evaluator", config, type(task).evaluate, _devices(placement))
        )
        found.task, found.placement, found._config = task, placement, config
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithm, "transformation", transformation)
        patch.setattr(stepper, "make_step", shared_step)
        patch.setattr(stepper, "init", shared_init)
        patch.setattr(synchronous, "Evaluator", evaluator)
        yield


def summary(workdir) -> dict:
    """What is in summary.json."""
    return json.loads((Path(workdir) / "summary.json").read_text())


def rows(workdir) -> list[dict]:
    """The rows of metrics.jsonl, as they are in the file."""
    return [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]


def measured(workdir) -> list[dict]:
    """The rows without what depends on the machine's speed."""
    speed = ("perf/", "goodput", "comm/", "stages/")
    return [
        {name: value for name, value in row.items() if not name.startswith(speed)}
        for row in rows(workdir)
    ]


def losses(workdir) -> np.ndarray:
    """The training loss of every step."""
    return np.array([row["train/loss"] for row in rows(workdir)])


class SignalAfter(Signals):
    """This process gets the signal after so many steps of the loop, which looks once per step."""

    def __init__(self, steps: int, number: int):
        self.looks, self._steps, self._number = 0, steps, number
        super().__init__()

    @property
    def received(self):
        self.looks += 1
        if self.looks == self._steps:
            os.kill(os.getpid(), self._number)
        return self._received

    @received.setter
    def received(self, number):
        self._received = number


class UncountedPause(loop.Pause):
    """Between two batches of an evaluation, where a look for signals is no step of the loop."""

    def __call__(self):
        signals, self._signals = self._signals, Quiet(self._signals)
        try:
            super().__call__()
        finally:
            self._signals = signals


class Quiet:
    """Signals for an evaluation, in which a look is no step of the loop."""

    def __init__(self, signals: Signals):
        self._signals = signals

    @property
    def received(self):
        signals = self._signals
        return signals._received if isinstance(signals, SignalAfter) else signals.received


def saved_steps(workdir) -> list[int]:
    """Steps of the finished checkpoints."""
    folder = Path(workdir) / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def saved(workdir, step: int, part: str = "state") -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its path, read by orbax alone."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    path = Path(workdir).absolute() / "checkpoints" / str(step) / part
    with ocp.StandardCheckpointer() as checkpointer:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            checkpointer.metadata(path).item_metadata.tree,
        )
        tree = checkpointer.restore(path, target)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(leaf_path, simple=True, separator=".") for leaf_path, _ in leaves]
    return {name: np.asarray(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}


def assert_same_state(one, other, step: int) -> None:
    """Two runs saved bit-identical parameters, moments, windows and counts at ``step``."""
    ours, theirs = saved(one, step), saved(other, step)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
