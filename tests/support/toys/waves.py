"""A task for whole runs in tests: some hundred numbers, with dropout, which compile in no time."""

import os
import threading
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import line_task
import numpy as np

from decent_jax import tasks
from decent_jax.ground.errors import DataError
from decent_jax.ground.fields import changeable, setting


@dataclass(frozen=True)
class Model:
    """Of the waves."""

    dropout: float = setting(0.1, "probability that a wave is left out")
    waves: int = setting(16, "hidden units")


@dataclass(frozen=True)
class Data(tasks.TaskData):
    """What goes wrong."""

    damaged: int = changeable(-1, "training point that cannot be read")
    damaged_eval: int = changeable(-1, "likewise of validation")
    pause: float = changeable(0.0, "seconds before each step, for signals to arrive")
    slow_eval: float = changeable(0.0, "seconds for each point of an evaluation, which is said")


validate = line_task.validate


def make(config, workdir, announce):
    return Waves(config)


class Points:
    """``count`` points of a curve with noise: arrays [x, y]; one may be ``damaged``."""

    def __init__(self, count, seed, damaged=-1, slow=0.0):
        self.damaged, self.slow = damaged, slow
        x, noise = np.random.default_rng(seed).normal(size=(2, count))
        self.points = np.stack([x, 3 * x + np.sin(3 * x) + noise / 4], 1).astype(np.float32)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        if index == self.damaged:
            raise DataError(f"point {index} is damaged")
        if self.slow and threading.current_thread() is not threading.main_thread():
            print(f"reading point {index}", flush=True)
            time.sleep(self.slow)
        return self.points[index]


class Waves(line_task.Line):
    """``y = slope x + out tanh(in x)``."""

    def __init__(self, config):
        self.waves, self.dropout = config.model.waves, config.model.dropout
        self.pause = config.data.pause
        more = int(os.environ.get("EXTRA_POINTS", "0"))  # on this host, or in this session
        self.train_source = Points(400 + more, 0, config.data.damaged)
        self.eval_source = Points(20, 1, config.data.damaged_eval, config.data.slow_eval)

    def init(self, key):
        drawn = jax.random.normal(key, (2, self.waves))
        return {"slope": jnp.float32(0), "in": drawn[0], "out": drawn[1]}, {}

    def _errors(self, params, batch, key=None):
        waves = jnp.tanh(jnp.outer(batch[:, 0], params["in"]))
        if key is not None and self.dropout:
            waves *= jax.random.bernoulli(key, 1 - self.dropout, waves.shape)
        predicted = params["slope"] * batch[:, 0] + waves @ params["out"]
        return jnp.square(predicted - batch[:, 1])

    def measure(self, block):
        time.sleep(self.pause)
        return {}

    def loss(self, params, model_state, batch, key):
        return self._errors(params, batch, key).mean(), model_state

    def summary(self):
        return {"parameters": 2 * self.waves + 1}

    def decay_mask(self, params):
        return {"slope": False, "in": True, "out": True}
