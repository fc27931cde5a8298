"""A task whose gradients are noise alone: then the spread of peers follows from who meets whom."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import line_task
import numpy as np

from decent_jax.ground.fields import setting


@dataclass(frozen=True)
class Model(line_task.Model):
    """Of the vector."""

    size: int = setting(500, "numbers")


Data = line_task.Data
load, export, validate = line_task.load, line_task.export, line_task.validate


def make(config, workdir, announce):
    return Noise(config)


class Normal:
    """Independent standard normal vectors."""

    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return np.random.default_rng(index).standard_normal(self.size, np.float32)


class Noise(line_task.Line):
    """See `decent_jax.tasks.Task`: a loss with the gradient of a mean of such vectors."""

    def __init__(self, config):
        super().__init__(config)
        self.size = config.model.size
        self.train_source = Normal(config.data.points, self.size)
        self.eval_source = Normal(8, self.size)

    def init(self, key):
        return {"w": jax.random.normal(key, (self.size,))}, {}

    def _errors(self, params, batch):
        return batch @ params["w"]

    def loss(self, params, model_state, batch, key):
        return jnp.mean(self._errors(params, batch)), model_state

    def demonstrate(self, params, model_state):
        return "noise"
