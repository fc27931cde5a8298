"""A task whose parameters and model state are trees of the test's choice, and such an optimizer."""

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


KINDS = ("bool", "int8", "uint8", "int16", "uint32", "int32", "float16", "bfloat16", "complex64")
KINDS += ("float8_e4m3fn", "float8_e5m2")


def any_arrays():
    """Arrays of every kind that can be saved, None, and what has no arrays."""
    return {
        "key": jax.random.key(1),
        "keys": [jax.random.split(jax.random.key(2, impl="rbg"), (2, 3)), jax.random.PRNGKey(3)],
        "kinds": tuple(jnp.ones((2, 3), kind) for kind in KINDS),
        "nothing": (None, {}, ()),
    }


STATES = {
    "": dict,
    "none": lambda: None,
    "empty": lambda: {"seen": jnp.zeros((0,))},
    "count": lambda: {"seen": jnp.zeros((2,), jnp.int32)},
    "int4": lambda: {"seen": jnp.zeros((2,), jnp.int4)},
    "uint2": lambda: {"seen": jnp.zeros((2,), jnp.uint2)},
    "float4": lambda: {"seen": jnp.zeros((2,), jnp.float4_e2m1fn)},
    "any": any_arrays,
}
AFTER = {  # what the loss makes of {"seen": ...}
    "": lambda state: state,
    "grows": lambda state: {"seen": jnp.tile(state["seen"], 2)},
    "casts": lambda state: {"seen": state["seen"] + 0.5},
    "loses": lambda state: {},
    "adds": lambda state: state | {"more": jnp.zeros(())},
}


@dataclass(frozen=True)
class Model(line_task.Model):
    """Of the line, and its trees."""

    tree: str = setting("plain", "of the parameters")
    state: str = setting("", "model state")
    after: str = setting("", "what the loss makes of it")
    mixes: bool = setting(False, "whether replicas mix it")


Data = line_task.Data
load, export, validate = line_task.load, line_task.export, line_task.validate


def make(config, workdir, announce):
    return Tree(config)


class Tree(line_task.Line):
    """See `decent_jax.tasks.Task`."""

    def __init__(self, config):
        super().__init__(config)
        self.tree, self.state = config.model.tree, config.model.state
        self.after, self.mixes_state = AFTER[config.model.after], config.model.mixes

    def init(self, key):
        return TREES[self.tree](jnp.float32(self.slope)), STATES[self.state]()

    def loss(self, params, model_state, batch, key):
        rest = sum(x.sum() for x in jax.tree.leaves(params) if x.size)
        if self.state == "any":
            next_key, own = jax.random.split(model_state["key"])
            rest += jax.random.normal(own)
            model_state = model_state | {"key": next_key}
        loss = super().loss(params, model_state, batch, key)[0] + 1e-3 * rest**2
        return loss, self.after(model_state)


def with_any_arrays(learning_rate):
    """Momentum that draws, and keeps arrays of every kind; one is empty, as GaLore's of a bias."""
    momentum = optax.sgd(learning_rate, 0.9)

    def update(grads, state, params=None):
        momenta, more = state
        change, momenta = momentum.update(grads, momenta, params)
        next_key, own = jax.random.split(more["key"])
        noise = 1e-3 * jax.random.normal(own)
        return jax.tree.map(lambda x: x + noise, change), (momenta, more | {"key": next_key})

    def init(params):
        return momentum.init(params), any_arrays() | {"projector": jnp.zeros((0, 3))}

    return optax.GradientTransformation(init, update)
