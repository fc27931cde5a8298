"""Image classification with peers of whom the first needs twice as long for every step.

`trainings.py` trains it, by --config.task=benchmarks.evidence.one_slow; the checkout must be in
PYTHONPATH.
"""

import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.tasks import image_classification

Model, Data = image_classification.Model, image_classification.Data
validate = image_classification.validate
load, export = image_classification.load, image_classification.export
SLOW = ("peers", "0")  # the end of the folder of the slow peer


def make(config, workdir, announce):
    """The task; its loss is `slowed` where ``workdir`` is that of the slow peer."""
    task = image_classification.make(config, workdir, announce)
    if Path(workdir).parts[-len(SLOW) :] == SLOW:
        task.loss = slowed(task.loss)
    return task


def slowed(loss: Callable) -> Callable:
    """The same loss, which sleeps for as long as its caller has worked since its last sleep.

    Not at the first step: what came before it, mostly compiling, may have taken a minute, and the
    peer would average with nobody until it woke up.
    """
    ended = None

    def pause(value):
        nonlocal ended
        if ended is not None:
            time.sleep(time.monotonic() - ended)
        ended = time.monotonic()
        return np.float32(0)

    def slow(params, model_state, batch, key):
        value, model_state = loss(params, model_state, batch, key)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        known = jax.lax.stop_gradient(value)  # so that the pause comes after the forward pass
        return value + jax.pure_callback(pause, shape, known, vmap_method="sequential"), model_state

    return slow
