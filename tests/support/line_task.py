"""A task as a user would write one in a package of their own: a line through points."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax import tasks
from decent_jax.ground.fields import changeable, setting


@dataclass(frozen=True)
class Model:
    """Of the line."""

    slope: float = setting(0.0, "at the start")


@dataclass(frozen=True)
class Data(tasks.TaskData):
    """Points on it."""

    points: int = setting(64, "on the line")
    shown: int = changeable(1, "predictions at the end")


def validate(config):
    pass


def make(config, workdir, announce):
    return Line(config)


class Points:
    """``y = 3 x`` at x = 0, 1, ... in [0, 1)."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return np.array([1, 3], np.float32) * index / self.count


class Line:
    """See `decent_jax.tasks.Task`."""

    unit, units_per_example, flops_per_example, mixes_state = "examples", 1, 6.0, False

    def __init__(self, config):
        self.slope = config.model.slope
        self.train_source = self.eval_source = Points(config.data.points)

    def init(self, key):
        return {"slope": jnp.float32(self.slope)}, {}

    def load_params(self):
        return None

    def _errors(self, params, batch):
        return jnp.square(params["slope"] * batch[:, 0] - batch[:, 1])

    def loss(self, params, model_state, batch, key):
        return self._errors(params, batch).mean(), model_state

    def evaluate(self, params, model_state, batch, weights):
        sums = {"loss": (self._errors(params, batch) * weights).sum()}
        return sums | {"count": weights.sum()}

    def decay_mask(self, params):
        return jax.tree.map(lambda _: False, params)

    def summary(self):
        return {"points": len(self.train_source)}

    def demonstrate(self, params, model_state):
        return f"y = {float(params['slope']):.2f} x"


def load(run):
    return float(run.params["slope"])


def export(run, out):
    out.write_text(f"{load(run)}")
    return f'{{"step": {run.step}}}'
