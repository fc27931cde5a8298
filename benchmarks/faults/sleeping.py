"""Tasks whose computing is a sleep, so that two cores can be several hosts; and their configs.

    train.py --config benchmarks/faults/sleeping.py        # with the checkout in PYTHONPATH
    train.py --config benchmarks/faults/sleeping.py:text   # the quickstart, which really trains
    train.py --config benchmarks/faults/sleeping.py:points # a line through points, by peers

The loss of the first is that of noise (its gradient is the batch), over as many parameters as
``model.size`` says. Each step, and of the first each batch of an evaluation, sleeps for
``data.compute_s`` inside the compiled program, times the factor of this host in ``data.slow``; the
host knows its number by its address. Of the last, reading a record takes ``data.read_s``, so XLA's
programs call no Python, and jax's cache keeps them.
"""

import socket
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax import train
from decent_jax.ground.fields import changeable, setting
from decent_jax.tasks import language_modeling as text
from decent_jax.train import flags

COMPUTE_S, SIZE = 0.2, 500_000
load, export = text.load, text.export


@dataclass(frozen=True)
class Model(text.Model):
    """The decoder, or a vector."""

    size: int = setting(SIZE, "parameters, where data.path is empty")


@dataclass(frozen=True)
class Data(text.Data):
    """Text, noise or points."""

    compute_s: float = changeable(COMPUTE_S, "seconds of a step")
    slow: str = changeable("", "host:factor,... of hosts that are slower")
    read_s: float = changeable(0.0, "seconds in which a point is read; 0: noise")


def get_config(kind="noise"):
    """Of noise on four hosts, of points, or the quickstart's with steps that also sleep 0.1 s."""
    config = train.default_config("benchmarks.faults.sleeping")
    if kind == "text":
        config.update(flags.load("quickstart").to_dict())
        config.task, config.data.compute_s = "benchmarks.faults.sleeping", 0.1
        return config
    config.algorithm = "decentralized_sgd"
    config.optimizer.name, config.optimizer.momentum = "sgd", 0.0
    config.num_replicas = config.batch_size = 4
    config.steps, config.learning_rate = 10**6, 1e-4
    config.lr_schedule.name, config.lr_schedule.warmup = "constant", 0
    config.log.every, config.eval.every = 5, 0
    config.checkpoint.every, config.checkpoint.every_minutes = 0, 0.0
    if kind == "points":
        config.model.size, config.data.read_s, config.data.prefetch = 64, 1.0, 1
        config.learning_rate, config.log.every = 0.02, 1
    return config


def validate(config):
    if config.data.path:
        text.validate(config)


def make(config, workdir, announce):
    if config.data.read_s or config.model.size < SIZE:
        return Line(config)
    if not config.data.path:
        return Noise(config)
    task = text.make(config, workdir, announce)
    seconds, loss = seconds_of(config), task.loss

    def slept(params, model_state, batch, key):
        value, model_state = loss(params, model_state, batch, key)
        return value + 0.0 * sleep(batch.ravel()[0], seconds), model_state

    task.loss = slept
    return task


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


class Noise:
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


class Points:
    """``y = w x`` + noise, with w = 1, ..., size in hundredths: rows of x and y."""

    def __init__(self, size, seconds):
        draw = np.random.default_rng(0)
        x = draw.normal(size=(4096, size))
        y = x @ np.arange(1, size + 1) / 100 + 0.1 * draw.normal(size=4096)
        self.rows, self.seconds = np.column_stack([x, y]).astype(np.float32), seconds

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.rows[index]


class Line(Noise):
    """A linear model of `Points`."""

    def __init__(self, config):
        self.size, size = config.model.size, config.model.size
        self.train_source = Points(size, config.data.read_s)
        self.eval_source = Points(size, 0.0)

    def errors(self, params, rows):
        return jnp.square(rows[:, :-1] @ params["w"] - rows[:, -1])

    def loss(self, params, model_state, batch, key):
        return self.errors(params, batch).mean(), model_state

    def evaluate(self, params, model_state, batch, weights):
        total = (self.errors(params, batch) * weights).sum()
        return {"loss": total, "count": weights.sum()}
