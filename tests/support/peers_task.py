"""A task for peers: a line through noisy points in 40 dimensions, whose data may be slow."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import line_task
import numpy as np

from decent_jax.ground.fields import changeable


@dataclass(frozen=True)
class Data(line_task.Data):
    """Slow points."""

    sleep_s: float = changeable(0.0, "per record")


Model = line_task.Model
SIZE = 40
load, export, validate = line_task.load, line_task.export, line_task.validate


def make(config, workdir, announce):
    return Lines(config)


class Points:
    """``y = w * x`` with w = 1, ..., 40 in tenths and random x."""

    def __init__(self, count, sleep_s):
        self.x = np.random.default_rng(0).normal(size=(count, SIZE)).astype(np.float32)
        self.sleep_s = sleep_s

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        return np.stack([self.x[index], self.x[index] * np.arange(1, SIZE + 1) / 10]).astype("f")


class Lines(line_task.Line):
    """See `decent_jax.tasks.Task`."""

    def __init__(self, config):
        super().__init__(config)
        self.train_source = Points(config.data.points, config.data.sleep_s)
        self.eval_source = Points(config.data.points, 0.0)

    def init(self, key):
        return {"w": jax.random.normal(key, (SIZE,)), "b": jnp.float32(1.0)}, {}

    def _errors(self, params, batch):
        return jnp.square(params["w"][None] * batch[:, 0] + params["b"] - batch[:, 1]).mean(axis=-1)

    def demonstrate(self, params, model_state):
        return f"b = {float(params['b']):.2f}"
