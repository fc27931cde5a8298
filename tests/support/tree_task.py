"""A task whose parameters are a tree of the test's choice, and an optimizer with an empty array."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import line_task
import optax

from decent_jax.ground.fields import setting

TREES = {
    "plain": lambda slope: {"slope": slope},
    "dots": lambda slope: {"slope": slope, "h.b": slope, "h": {"b": slope}},
    "slashes": lambda slope: {"slope": slope, "h/b": slope, "h": {"b": slope}},
    "empty": lambda slope: {"slope": slope, "adapter": {"w": jnp.zeros((0, 4))}},
    "haiku": lambda slope: {"slope": slope, "mlp/~/linear": {"w": slope}, "mlp": {"b": slope}},
}


@dataclass(frozen=True)
class Model(line_task.Model):
    """Of the line, and its tree."""

    tree: str = setting("plain", "of the parameters")


Data = line_task.Data
load, export, validate = line_task.load, line_task.export, line_task.validate


def make(config, workdir, announce):
    return Tree(config)


class Tree(line_task.Line):
    """See `decent_jax.tasks.Task`."""

    def __init__(self, config):
        super().__init__(config)
        self.tree = config.model.tree

    def init(self, key):
        state = {"seen": jnp.zeros((0,))} if self.tree == "empty state" else {}
        return TREES.get(self.tree, TREES["plain"])(jnp.float32(self.slope)), state

    def loss(self, params, model_state, batch, key):
        rest = sum(x.sum() for x in jax.tree.leaves(params) if x.size)
        return super().loss(params, model_state, batch, key)[0] + 1e-3 * rest**2, model_state


def with_an_empty_array(learning_rate):
    """Momentum whose state also has an array without elements, as GaLore's has for a bias."""
    momentum = optax.sgd(learning_rate, 0.9)
    return optax.GradientTransformation(
        lambda params: (momentum.init(params), {"projector": jnp.zeros((0, 3))}),
        lambda grads, state, params=None: (lambda made: (made[0], (made[1], state[1])))(
            momentum.update(grads, state[0], params)
        ),
    )
