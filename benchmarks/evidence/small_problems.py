"""Small problems on which all methods are compared, and the loop that runs any of them.

A run is one jitted scan on one device, replicas vmapped. The matrices of its rounds, the learning
rate and the data are arguments (`decent_jax.gossip.Simulated`), so a method is compiled once for
all graphs and learning rates. Methods that depend on the number of a round (`Variant.numbered`)
are compiled for one cycle of their schedule, unrolled. The problems are quadratics that differ by
replica, and pictures of ten generated shapes that are dealt out to replicas.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax import optim, topology
from decent_jax.data.images.generated_images import GeneratedImages
from decent_jax.data.partition import dirichlet
from decent_jax.gossip import Simulated, codecs
from decent_jax.optim import METHODS, Parts
from decent_jax.topology import Schedule

RING, EXP = "bidirectional_ring", "one_peer_exp"
MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the tables.

    own: the schedules it is made for, where those are not the ring and the exponential graph.
    every: steps between two rounds.
    centre: the learning rate on images from which the search for the best sets out.
    """

    label: str
    method: str
    optimizer: str = "sgd"
    combine: str = ""
    numbers: tuple[tuple[str, Any], ...] = ()
    own: tuple[str, ...] = ()
    every: int = 1
    centre: float = 0.3
    codec: str = "float32"

    @property
    def numbered(self) -> bool:
        return self.phases > 1 or self.method == "swarm"

    @property
    def phases(self) -> int:
        method = METHODS[self.method]
        return method.phases({**method.numbers, **dict(self.numbers)})

    def build(self, schedule: Schedule, rate: optax.ScalarOrSchedule):
        """The transformation; ValueError where the method is not valid on the schedule."""
        inner = {
            "sgd": lambda: optax.sgd(rate),
            "momentum": lambda: optax.sgd(rate, momentum=MOMENTUM),
            "adam": lambda: optax.adam(rate),
            "accum_adam": lambda: optim.accum_adamw(rate, weight_decay=0.0, accum_steps=2),
        }[self.optimizer]()
        return METHODS[self.method].build(self.parts(schedule, rate, inner))

    def parts(self, schedule: Schedule, rate: optax.ScalarOrSchedule, inner) -> Parts:
        return Parts(
            schedule,
            rate,
            inner,
            combine=self.combine,
            mix_every=self.every,
            codec=codecs.named(self.codec),
            optimizer={"momentum": MOMENTUM},
            numbers=dict(self.numbers),
        )

    def cycle(self, schedule: Schedule) -> tuple[int | None, ...]:
        """The rounds that are compiled, one after the other."""
        period = schedule.period if self.numbered else 1
        rounds = (schedule.round_at(t, self.every) for t in range(period * self.every))
        return tuple(None if r is None else r % period for r in rounds)

    def models_sent(self, schedule: Schedule, params) -> float:
        """By the busiest replica per step, in sizes of the model; a ring all-reduce sends two."""
        size = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
        if self.method == "all_reduce":
            return 2 * (1 - 1 / schedule.num_replicas)
        parts = self.parts(schedule, 0.1, optax.sgd(0.1))
        return METHODS[self.method].bytes_sent(params, parts) / size


AVERAGED = (f"periodic_average({RING}, every=8)", f"periodic_average({EXP}, every=8)")
PAIRS = ("random_matching",)
TOP = (("compressor", "top_k"), ("fraction", 0.1), ("gamma", 0.3))
INT8 = (("compressor", "int8"), ("gamma", 0.3))
WHOLE = {"own": ("complete",), "every": 4}
VARIANTS = (
    Variant("all_reduce", "all_reduce", own=("complete",), centre=1.0),
    Variant("all_reduce, momentum", "all_reduce", "momentum", own=("complete",), centre=0.1),
    Variant("D-PSGD, AWC", "decentralized_sgd", combine="awc"),
    Variant("D-PSGD, ATC", "decentralized_sgd", combine="atc"),
    Variant("DmSGD, AWC", "decentralized_sgd", "momentum", "awc", centre=0.1),
    Variant("DmSGD, ATC", "decentralized_sgd", "momentum", "atc", centre=0.1),
    Variant("gossiped momentum", "gossiped_momentum", "momentum", centre=0.1),
    Variant("quasi-global SGD", "quasi_global_sgd", centre=0.3),
    Variant("exact diffusion", "exact_diffusion", centre=0.1),
    Variant("D2", "d2"),
    Variant("gradient tracking", "gradient_tracking", centre=0.1),
    Variant("push-sum", "push_sum"),
    Variant("push-sum, directed", "push_sum", own=("random_out",), centre=0.1),
    Variant("Gossip-PGA", "decentralized_sgd", combine="atc", own=AVERAGED),
    Variant("Gossip-PGA, momentum", "decentralized_sgd", "momentum", "atc", (), AVERAGED, 1, 0.1),
    Variant("local SGD", "decentralized_sgd", combine="atc", **WHOLE),
    Variant("local SGD, momentum", "decentralized_sgd", "momentum", "atc", centre=0.1, **WHOLE),
    Variant("DiLoCo", "diloco", centre=0.3, **WHOLE),
    Variant("CHOCO, top 10%", "choco", numbers=TOP),
    Variant("CHOCO, int8", "choco", numbers=INT8),
    Variant("swarm", "swarm", combine="awc", own=PAIRS),
    Variant("swarm, blocking", "swarm", combine="atc", own=PAIRS),
    Variant("swarm, 8 bit", "swarm", combine="awc", codec="lattice8", own=PAIRS),
    Variant("swarm, momentum", "swarm", "momentum", "awc", own=PAIRS, centre=0.1),
    Variant("all_reduce, Adam", "all_reduce", "adam", own=("complete",), centre=0.01),
    Variant("decentralized Adam", "decentralized_adam", "adam", "awc", centre=0.03),
    Variant("accumulated Adam", "accum_adam", "accum_adam", "awc", centre=0.03),
)


class Pair(NamedTuple):
    """A variant on a schedule, or the library's reason against it."""

    variant: Variant
    name: str
    schedule: Schedule | None
    refusal: str = ""


def pair(variant: Variant, name: str, n: int) -> Pair:
    schedule = topology.repeat(topology.make(name, n), variant.phases)
    try:
        with warnings.catch_warnings():  # the ring of an even n is at the bound of D2's stability
            warnings.filterwarnings("ignore", message=".*the bound of its")
            variant.build(schedule, 0.1)
    except ValueError as error:
        return Pair(variant, name, None, str(error))
    return Pair(variant, name, schedule)


# --- the loop ------------------------------------------------------------------------------------


def matrices(pair: Pair, steps: int) -> np.ndarray:
    """(steps, n, n): what is mixed in every step; a step that does not mix has the identity."""
    schedule = pair.schedule
    rounds = [schedule.round_at(t, pair.variant.every) for t in range(steps)]
    eye = np.eye(schedule.num_replicas)
    return np.stack([eye if r is None else schedule.matrix(r) for r in rounds])


class Problem(NamedTuple):
    """gradient: (params, one replica's inputs of a step) -> (loss, gradients).

    decay: the factor of the learning rate at a 0-based step.
    observe: of the stacked parameters, recorded at regular steps.
    """

    gradient: Callable
    decay: Callable | None
    observe: Callable


@functools.cache
def _program(problem: Problem, variant: Variant, schedule: Schedule):
    """Jitted (rate, stacked start, matrices (E, C, c, n, n), inputs (E, C, c, n, ...)).

    E records of C cycles of c steps each.
    """
    cycle = variant.cycle(schedule)

    def run(rate, start, matrices, inputs):
        def rate_at(count):
            return rate * problem.decay(count)

        tx = variant.build(schedule, rate if problem.decay is None else rate_at)

        def one(round, x, state, inputs):
            loss, gradients = problem.gradient(x, inputs)
            updates, state = tx.update(gradients, state, x, round=round, value=loss)
            return optim.apply_updates(x, updates), state

        def whole_cycle(carry, given):
            for k, r in enumerate(cycle):
                mixed = None if r is None else Simulated(r, given[0][k])
                step = jax.vmap(functools.partial(one, mixed), axis_name="replica")
                carry = step(*carry, jax.tree.map(lambda x, k=k: x[k], given[1]))
            return carry, None

        def until_record(carry, given):
            carry, _ = jax.lax.scan(whole_cycle, carry, given)
            return carry, problem.observe(carry[0])

        carry = start, jax.vmap(tx.init)(start)
        (params, _), records = jax.lax.scan(until_record, carry, (matrices, inputs))
        return params, records

    return jax.jit(run)


def train(
    problem: Problem, pair: Pair, rate: float, start, mixing: np.ndarray, inputs, records: int = 1
):
    """(stacked parameters at the end, records).

    mixing: (steps, n, n); inputs: pytree of (steps, n, ...).
    """
    variant, schedule = pair.variant, pair.schedule
    if not variant.numbered:  # the same program for all schedules
        schedule = _any_schedule(variant, schedule.num_replicas)
    length, steps = len(variant.cycle(schedule)), len(mixing)
    if steps % (records * length):
        raise ValueError(f"{steps} steps are not {records} records of cycles of {length}")

    def cut(x):
        return jnp.asarray(x).reshape(records, -1, length, *x.shape[1:])

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the bound of its")
        program = _program(problem, variant, schedule)
        rate = jnp.asarray(rate, jnp.result_type(float))
        mixing = mixing.astype(jnp.result_type(float))
        return jax.device_get(program(rate, start, cut(mixing), jax.tree.map(cut, inputs)))


@functools.cache
def _any_schedule(variant: Variant, n: int) -> Schedule:
    for name in (*variant.own, RING):
        found = pair(variant, name, n)
        if found.schedule is not None:
            return found.schedule
    raise ValueError(f"{variant.label} is valid on none of its schedules")


# --- a heterogeneous quadratic -------------------------------------------------------------------

QUADRATIC_REPLICAS, COORDINATES = 8, 10
OPTIMUM = 14 / 3


def _quadratic_gradient(x, inputs):
    a, b = inputs
    return jnp.sum(a * (x - b) ** 2) / 2, a * (x - b)


QUADRATIC = Problem(_quadratic_gradient, None, lambda x: x)


def quadratic(pair: Pair, rate: float, steps: int) -> np.ndarray:
    """(steps / c, n, COORDINATES) float64: the parameters after every cycle of c steps.

    f_i(x) = a_i ||x - b_i||^2 / 2 with a_i = (i + 1) / 8 and b_i = i, whose average has its optimum
    at 14/3 in each coordinate. Coordinate c begins at c, so that compressors have a choice.
    """
    n = QUADRATIC_REPLICAS
    i = np.arange(n)
    inputs = tuple(np.broadcast_to(x[:, None], (steps, n, 1)) for x in ((i + 1) / 8, i * 1.0))
    with jax.enable_x64(True):
        start = jnp.tile(jnp.arange(COORDINATES, dtype=float), (n, 1))
        records = steps // len(pair.variant.cycle(pair.schedule))
        mixing = matrices(pair, steps)
        return train(QUADRATIC, pair, rate, start, mixing, inputs, records)[1]


# --- pictures of ten shapes ----------------------------------------------------------------------

SIDE, CLASSES, CHANNELS, KERNEL = 16, 10, (16, 32, 32), 3
LAST_RATE = 0.1  # of the peak
BATCH = 8  # of a replica


def image_params(seed: int = 0) -> dict[str, jax.Array]:
    """A convolutional net of three layers of stride 2 and a linear one: 15,338 parameters."""
    rng = np.random.default_rng(seed)
    params, width = {}, 1
    for k, channels in enumerate(CHANNELS):
        fan_in = KERNEL**2 * width
        params[f"w{k}"] = rng.normal(size=(fan_in, channels)) * np.sqrt(2 / fan_in)
        params[f"b{k}"] = np.zeros(channels)
        width = channels
    fan_in = width * (SIDE >> len(CHANNELS)) ** 2
    params["w"] = rng.normal(size=(fan_in, CLASSES)) * np.sqrt(1 / fan_in)
    params["b"] = np.zeros(CLASSES)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def image_logits(params, images: jax.Array) -> jax.Array:
    """(B, SIDE, SIDE) -> (B, CLASSES). Convolutions as products of patches: fast under vmap."""
    x = images[..., None]
    for k in range(len(CHANNELS)):
        x = jax.nn.relu(_add(_patches(x) @ params[f"w{k}"], params[f"b{k}"]))
    return _add(x.reshape(len(x), -1) @ params["w"], params["b"])


def _add(x, bias):
    return x + jnp.broadcast_to(bias, x.shape)


def _patches(x: jax.Array) -> jax.Array:
    """(B, H, W, C) -> (B, H / 2, W / 2, KERNEL^2 C), around every second pixel."""
    size = x.shape[1]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [(i, j) for i in range(KERNEL) for j in range(KERNEL)]
    return jnp.concatenate([x[:, i : i + size : 2, j : j + size : 2] for i, j in shifts], axis=-1)


class Pictures(NamedTuple):
    """images: (N, SIDE, SIDE) float32, grey, each of mean 0; labels: (N,) int32."""

    images: np.ndarray
    labels: np.ndarray


@functools.cache
def pictures(split: str, count: int) -> Pictures:
    """`GeneratedImages` of 32 pixels, averaged over 2 x 2 pixels and 3 colours."""
    source = GeneratedImages(split, count, size=2 * SIDE)
    grey = source.images.astype(np.float32).mean(axis=-1)
    grey = grey.reshape(count, SIDE, 2, SIDE, 2).mean(axis=(2, 4))
    grey -= grey.mean(axis=(1, 2), keepdims=True)
    return Pictures(grey / 64, source.labels)


def _image_gradient(params, inputs):
    images, labels = inputs

    def loss_of(params):
        logits = image_logits(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return jax.value_and_grad(loss_of)(params)


@functools.cache
def image_problem(steps: int, warmup: float = 0.0) -> Problem:
    """Cosine decay to `LAST_RATE`, after a linear warm-up; records are consensus models."""
    cosine, rising = optax.cosine_decay_schedule(1.0, steps, LAST_RATE), round(warmup * steps)

    def decay(count):
        return cosine(count) * jnp.minimum(1, (count + 1) / max(1, rising))

    return Problem(_image_gradient, decay, lambda x: jax.tree.map(lambda x: x.mean(axis=0), x))


@dataclasses.dataclass(frozen=True)
class ImageTask:
    """Replicas with their own pictures, and a number of steps.

    alpha: of the Dirichlet partition.
    warmup: part of the steps in which the learning rate rises.
    """

    num_replicas: int
    steps: int
    alpha: float
    train: int = 20_000
    held_out: int = 4_000
    seed: int = 0
    warmup: float = 0.0

    def owned(self) -> np.ndarray:
        """(n, N // n): the pictures of each replica."""
        labels = pictures("train", self.train).labels
        return dirichlet(labels, self.num_replicas, self.alpha, self.seed).owned

    def run(self, pair: Pair, rate: float) -> "Outcome":
        start = jax.tree.map(
            lambda x: jnp.tile(x, (self.num_replicas,) + (1,) * x.ndim), image_params(self.seed)
        )
        mixing = matrices(pair, self.steps)
        problem = image_problem(self.steps, self.warmup)
        params, means = train(problem, pair, rate, start, mixing, _batches(self))
        held_out = pictures("val", self.held_out)
        return Outcome(
            float(rate),
            float(_accuracies(means, held_out)[-1]),
            float(_accuracies(params, held_out).mean()),
            _distance(params),
        )


class Outcome(NamedTuple):
    """accuracy: of the consensus model at the end; alone: the mean of single replicas'.

    distance: the consensus distance, relative to the norm of the consensus model.
    """

    rate: float
    accuracy: float
    alone: float
    distance: float


@functools.lru_cache(maxsize=9)  # some 70 MB each
def _batches(task: ImageTask) -> Pictures:
    """(steps, n, BATCH, ...): each replica goes through its own, in a new order every time."""
    owned, rng = task.owned(), np.random.default_rng([task.seed, 2])
    passes = -(-task.steps * BATCH // owned.shape[1])
    order = np.concatenate([rng.permuted(owned, axis=1) for _ in range(passes)], axis=1)
    order = order[:, : task.steps * BATCH].reshape(len(owned), task.steps, BATCH).swapaxes(0, 1)
    data = pictures("train", task.train)
    return Pictures(data.images[order], data.labels[order])


@jax.jit
def _right(stacked, images: jax.Array, labels: jax.Array) -> jax.Array:
    """(models,): how many of the pictures each model names."""

    def one(params):
        return (image_logits(params, images).argmax(axis=-1) == labels).sum()

    return jax.lax.map(one, stacked)


def _accuracies(stacked, held_out: Pictures) -> np.ndarray:
    """(models,)"""
    count, right = len(held_out.labels), 0
    for part in np.split(np.arange(count), range(500, count, 500)):
        right = right + np.asarray(_right(stacked, *(x[part] for x in held_out)))
    return right / count


def _distance(stacked) -> float:
    leaves = [np.float64(x) for x in jax.tree.leaves(stacked)]
    means = [x.mean(axis=0) for x in leaves]
    apart = sum(((x - m) ** 2).sum() for x, m in zip(leaves, means, strict=True)) / len(leaves[0])
    return float(np.sqrt(apart / sum((m**2).sum() for m in means)))
