"""The components of a stage: its part of the model, its placement, its method."""

import math
from typing import Any, NamedTuple

import jax
import optax

from decent_jax import optim, replicas
from decent_jax.gossip import codecs
from decent_jax.ground import fields
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.pytree import PyTree
from decent_jax.models import decoders, gpt2, pieces
from decent_jax.pipelines import Config
from decent_jax.plan import orders
from decent_jax.replicas import Placement
from decent_jax.topology import Schedule
from decent_jax.train import algorithm
from decent_jax.train import config as config_lib

TABLE = "wte"  # the token embedding, which a tied output layer shares


class Part(NamedTuple):
    """A stage's part of the model, with the members of a task that initialization needs.

    Every parameter belongs to one stage. A tied output layer borrows the token embedding of the
    first stage and returns its gradient.
    """

    task: Any  # of the whole model
    stage: int
    counts: list[int]  # layers of each stage

    @property
    def start(self) -> int:
        """The index of the stage's first block."""
        return sum(self.counts[: self.stage])

    @property
    def stop(self) -> int:
        """The index of the stage's last block, plus 1."""
        return self.start + self.counts[self.stage]

    @property
    def is_first(self) -> bool:
        """Whether it has the embeddings."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer and the loss."""
        return self.stage == len(self.counts) - 1

    @property
    def lends(self) -> bool:
        """Whether another stage uses its token embedding as output layer."""
        return self.task.config.tied and self.is_first and not self.is_last

    @property
    def borrows(self) -> bool:
        """Whether its output layer is the token embedding of the first stage."""
        return self.task.config.tied and self.is_last and not self.is_first

    def of_whole(self, params: PyTree) -> PyTree:
        """The stage's parameters, selected from the whole model's."""
        params = decoders.part(self.task.config, params, self.start, self.stop)
        return {name: params[name] for name in params if not (self.borrows and name == TABLE)}

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """The stage's initial parameters and model state; under `jax.jit`, no others are drawn."""
        params, model_state = self.task.init(key)
        return self.of_whole(params), model_state

    def load_params(self) -> PyTree | None:
        """The stage's part of the pretrained parameters, or None."""
        loaded = self.task.load_params()
        return None if loaded is None else self.of_whole(loaded)


def layers_of(config: Config, model: gpt2.GPT2Config) -> list[int]:
    """The number of layers of each stage: from the config, or else balanced.

    The output layer's share of the compute time is estimated from its number of parameters.
    """
    own, last_costs = config.pipeline, model.vocab_size * model.width / (12 * model.width**2)
    return orders.layers_of(own.layers, model.layers, own.stages, last_costs)


def method(
    config: Config, schedule: Schedule, rate: optax.Schedule, placement: Placement
) -> optim.Method:
    """The method of one stage of a replica, for gradients that are already clipped.

    Clipping comes first because it needs the norm over all stages. For ``all_reduce``, gradients
    are averaged even before that, so its method has no rounds.
    """
    unclipped = config_lib.changed(config, **{"optimizer.clip_norm": 0.0})
    mask = pieces.decay_mask
    if config.algorithm == "all_reduce":
        parts = algorithm.parts(unclipped, schedule, rate, mask, placement.axis_name)
        mixes = optim.decentralized(parts.inner, schedule, axis_name=placement.axis_name)
        return optim.as_method(mixes)
    return algorithm.transformation(unclipped, schedule, rate, mask, placement.axis_name)


def check(config: Config) -> None:
    """Make all checks that need neither the model nor the cluster.

    Raises:
      ConfigError: the config cannot be used; the message names the field and its value.
    """
    makes = (optim.all_reduce, optim.decentralized)
    allowed = {
        "task": ["language_modeling"],
        "algorithm": [name for name, method in optim.METHODS.items() if method.make in makes],
        "micro_batches": [1],
        "mesh.fsdp": [1],
        "data.partition": ["iid"],
        "cluster.coordinator": [""],
    }
    fields.check_allowed(config, allowed)
    if config.model.preset not in gpt2.PRESETS:
        wanted = f"must be a GPT-2 with trainer=pipelines: {', '.join(gpt2.PRESETS)}"
        raise ConfigError.about("model.preset", config.model.preset, wanted)
    config_lib.check(config)
    config_lib.check_cuts(config, "pipeline.micro_batches")


def bytes_between_stages(config: Config, model: gpt2.GPT2Config) -> int:
    """Bytes per step of the activations that a replica's stage sends to the next stage."""
    rows = config.batch_size // config.num_replicas * model.context
    return codecs.bytes_sent(codecs.NAMED[config.pipeline.codec], (rows, model.width))


def place(num_replicas: int) -> Placement:
    """Place a stage's replicas: one per process, or all on the device of a single process."""
    count = jax.process_count()
    devices = [jax.local_devices(process_index=p)[0] for p in range(count)]
    return replicas.place(num_replicas, devices)


def total_norm(squares: list[float]) -> float:
    """The norm of a whole gradient, from the sum of squares of each stage."""
    return math.sqrt(math.fsum(squares))
