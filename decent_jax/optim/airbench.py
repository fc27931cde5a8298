"""The optimizer of airbench94 (Jordan, 2024): Muon for filters, SGD for the rest.

Source: github.com/KellerJordan/cifar10-airbench, airbench94_muon.py. `decent_jax.models.airbench`
has the network.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

_BATCH = 2000  # images, whose losses are summed there; here a loss is their mean
# Rates and weight decay as published, for that sum; the rate of the filters is the run's.
_FILTERS, _BIASES, _HEAD, _DECAY = 0.24, 0.053, 0.67, 2e-6 * _BATCH
_WHITENED = 3 / 8  # of the run, in which the biases after the whitening are trained


def optimizer(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Muon for filters, SGD with Nesterov's momentum for biases and the last layer.

    The rates of the latter keep their published ratio to ``learning_rate``, that of the filters,
    which is linear from 0.24 to 0. A filter has a norm of 1 on average before each of its updates.
    """

    def sgd(peak, share=1.0):
        def rate(step):  # peak at the start, 0 after this share of the run
            left = learning_rate(step) / _FILTERS
            return _BATCH * peak * jnp.maximum(0.0, 1 - (1 - left) / share)

        return optax.chain(
            optax.add_decayed_weights(_DECAY / _BATCH / peak),
            optax.sgd(rate, momentum=0.85, nesterov=True),
        )

    def axes(filters):
        return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers((0, 1, 2), (3,)), filters)

    muon = optax.contrib.scale_by_muon(
        ns_steps=3, beta=0.6, eps=1e-7, weight_dimension_numbers=axes
    )

    def rescaled(updates, params):
        def change(update, x):
            return update + x * (math.sqrt(x.shape[-1]) / jnp.linalg.norm(x.ravel()) - 1)

        return jax.tree.map(change, updates, params)

    by_kind: dict[Any, optax.GradientTransformation] = {
        "filters": optax.chain(
            muon, optax.scale_by_learning_rate(learning_rate), optax.stateless(rescaled)
        ),
        "biases": sgd(_BIASES),
        "after whitening": sgd(_BIASES, _WHITENED),
        "head": sgd(_HEAD),
        "frozen": optax.set_to_zero(),
    }
    return optax.partition(by_kind, _kinds)


def _kinds(params: Any) -> Any:
    known = {"fc": {"kernel": "head"}, "whiten": {"kernel": "frozen", "bias": "after whitening"}}
    others = {name: part for name, part in params.items() if name not in known}
    return known | jax.tree.map(lambda x: "filters" if x.ndim == 4 else "biases", others)
