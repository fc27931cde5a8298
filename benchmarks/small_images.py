"""The pictures that `algorithms.py` trains on: ten generated shapes, dealt out to replicas."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from small_problems import Pair, Problem, matrices, train

from decent_jax.data.images.generated_images import GeneratedImages
from decent_jax.data.partition import dirichlet

SIDE, CLASSES, CHANNELS, KERNEL = 16, 10, (16, 32, 32), 3
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


LAST_RATE = 0.1  # of the peak


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

    alpha: of the Dirichlet partition; infinity: pictures dealt out at random.
    warmup: part of the steps in which the learning rate rises.
    """

    num_replicas: int
    steps: int
    alpha: float = math.inf
    train: int = 20_000
    held_out: int = 4_000
    seed: int = 0
    warmup: float = 0.0

    def owned(self) -> np.ndarray:
        """(n, N // n): the pictures of each replica."""
        n, rng = self.num_replicas, np.random.default_rng([self.seed, 1])
        if math.isinf(self.alpha):
            return rng.permutation(self.train)[: self.train // n * n].reshape(n, -1)
        labels = pictures("train", self.train).labels
        return dirichlet(labels, n, self.alpha, self.seed).owned

    def run(self, pair: Pair, rate: float, *, loss: float = 0.0, records: int = 1) -> "Outcome":
        start = jax.tree.map(
            lambda x: jnp.tile(x, (self.num_replicas,) + (1,) * x.ndim), image_params(self.seed)
        )
        mixing = matrices(pair, self.steps, loss, self.seed)
        problem = image_problem(self.steps, self.warmup)
        params, means = train(problem, pair, rate, start, mixing, _batches(self), records)
        held_out = pictures("val", self.held_out)
        return Outcome(
            float(rate),
            [float(x) for x in _accuracies(means, held_out)],
            float(_accuracies(params, held_out).mean()),
            _distance(params),
        )


class Outcome(NamedTuple):
    """accuracies: of the consensus model at the records; alone: the mean of single replicas'.

    distance: the consensus distance, relative to the norm of the consensus model.
    """

    rate: float
    accuracies: list[float]
    alone: float
    distance: float

    @property
    def accuracy(self) -> float:
        """At the end."""
        return self.accuracies[-1]


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
