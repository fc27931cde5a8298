"""The quickstart's language model on hosts whose computing is a sleep, see benchmarks/waiting.py.

The model really trains; each step also sleeps for ``data.compute_s``, times the factor of the host.
"""

from benchmarks import waiting
from decent_jax.tasks import language_modeling as lm

FIELDS = {**lm.FIELDS, **{k: v for k, v in waiting.FIELDS.items() if k.startswith("data.")}}
validate, load, export = lm.validate, lm.load, lm.export


def make(config, workdir, announce):
    task = lm.make(config, workdir, announce)
    seconds, loss = waiting.seconds_of(config), task.loss

    def slept(params, model_state, batch, key):
        value, model_state = loss(params, model_state, batch, key)
        return value + 0.0 * waiting.sleep(batch.ravel()[0], seconds), model_state

    task.loss = slept
    return task
