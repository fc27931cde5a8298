"""The problem that `swarm.py` trains on: 10 classes, each a mixture of 6 Gaussians, in NumPy."""

from typing import NamedTuple

import numpy as np

CLASSES, CLUSTERS, INPUTS, HIDDEN = 10, 6, 16, 48
TRAIN, HELD_OUT = 16_384, 8_192
SPREAD_OF_A_CLUSTER = 0.8
_CUTS = np.cumsum([INPUTS * HIDDEN, HIDDEN, HIDDEN * CLASSES])


class Examples(NamedTuple):
    inputs: np.ndarray  # (examples, INPUTS)
    labels: np.ndarray  # (examples,)


def draw_examples(seed: int = 0) -> tuple[Examples, Examples, Examples]:
    """To train, to choose the learning rate, and to test."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((CLASSES * CLUSTERS, INPUTS))
    cluster_of = rng.integers(len(centres), size=TRAIN + 2 * HELD_OUT)
    deviation = rng.standard_normal((len(cluster_of), INPUTS))
    inputs = centres[cluster_of] + SPREAD_OF_A_CLUSTER * deviation
    parts = np.split(np.arange(len(inputs)), [TRAIN, TRAIN + HELD_OUT])
    train, choose, test = (Examples(inputs[part], cluster_of[part] % CLASSES) for part in parts)
    return train, choose, test


def initial_weights(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    first = rng.standard_normal(INPUTS * HIDDEN) * np.sqrt(2 / INPUTS)
    second = rng.standard_normal(HIDDEN * CLASSES) * np.sqrt(1 / HIDDEN)
    return np.concatenate([first, np.zeros(HIDDEN), second, np.zeros(CLASSES)])


def layers(weights: np.ndarray) -> tuple[np.ndarray, ...]:
    first, first_bias, second, second_bias = np.split(weights, _CUTS)
    return first.reshape(INPUTS, HIDDEN), first_bias, second.reshape(HIDDEN, CLASSES), second_bias


def gradient(weights: np.ndarray, examples: Examples) -> np.ndarray:
    """(parameters,) of the mean cross-entropy."""
    first, first_bias, second, second_bias = layers(weights)
    hidden = np.maximum(examples.inputs @ first + first_bias, 0)
    logits = hidden @ second + second_bias
    error = np.exp(logits - logits.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(error)), examples.labels] -= 1
    error /= len(error)
    back = (error @ second.T) * (hidden > 0)
    parts = (examples.inputs.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0))
    return np.concatenate([part.ravel() for part in parts])


def accuracy(weights: np.ndarray, examples: Examples) -> float:
    first, first_bias, second, second_bias = layers(weights)
    hidden = np.maximum(examples.inputs @ first + first_bias, 0)
    return float((np.argmax(hidden @ second + second_bias, axis=1) == examples.labels).mean())
