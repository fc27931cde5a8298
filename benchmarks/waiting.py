"""A task for benchmarks/peers.py: computing is a sleep, so that two cores can be several hosts.

The loss is that of noise (its gradient is the batch), over as many parameters as ``model.size``
says. Each step and each batch of an evaluation sleep for ``data.compute_s`` inside the compiled
program, times the factor of this host in ``data.slow``; the host knows its number by its address.
"""

import socket
import time

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.ground.fields import Field

FIELDS = {
    "model.size": Field(500_000, "parameters"),
    "data.compute_s": Field(0.2, "seconds of a step", may_change=True),
    "data.slow": Field("", "host:factor,... of hosts that are slower", may_change=True),
}


def validate(config):
    pass


def make(config, workdir, announce):
    return Waiting(config)


def seconds_of(config):
    """The seconds that a step of this host sleeps."""
    slow = dict(pair.split(":") for pair in config.data.slow.split(",") if pair)
    if not slow:
        return config.data.compute_s
    address = socket.gethostbyname(socket.gethostname())  # benchmarks/hosts.sh: 10.77.0.1, ...
    return config.data.compute_s * float(slow.get(str(int(address.split(".")[-1]) - 1), 1.0))


def sleep(number, seconds):
    """float32 (): ``number``, after this many seconds."""

    def wait(value):
        time.sleep(seconds)
        return np.float32(value)

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(wait, shape, number, vmap_method="sequential")


class Numbers:
    """Records without information: each is its own number."""

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return np.float32([index])


class Waiting:
    """See `decent_jax.tasks.Task`."""

    unit, units_per_example, flops_per_example, mixes_state = "examples", 1, 1.0, False

    def __init__(self, config):
        self.size = config.model.size
        self.train_source = self.eval_source = Numbers()
        self.seconds = seconds_of(config)

    def init(self, key):
        return {"w": jnp.zeros(self.size)}, {}

    def load_params(self):
        return None

    def loss(self, params, model_state, batch, key):
        slept = sleep(batch.sum(), self.seconds)
        noise = jnp.sin(jnp.arange(self.size, dtype=jnp.float32) * slept)
        return jnp.vdot(params["w"], noise), model_state

    def evaluate(self, params, model_state, batch, weights):
        slept = sleep(weights.sum(), self.seconds)
        return {"loss": 0.0 * slept, "count": weights.sum()}

    def decay_mask(self, params):
        return jax.tree.map(lambda _: False, params)

    def summary(self):
        return {}

    def demonstrate(self, params, model_state):
        return ""
