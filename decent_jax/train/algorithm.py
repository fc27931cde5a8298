"""The algorithm of a config as an optax transformation, and what it costs."""

import dataclasses
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from decent_jax import optim, topology
from decent_jax.errors import ConfigError
from decent_jax.gossip import AxisName, wire
from decent_jax.optim import METHODS, Method, Parts
from decent_jax.text import format_number
from decent_jax.topology import Schedule


def transformation(
    config: ConfigDict,
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    decay_mask: Any = None,
    axis_name: AxisName = "replica",
) -> optax.GradientTransformationExtraArgs:
    """The transformation of one replica.

    Raises:
      ValueError: a pairing that cannot be, in one sentence that names both sides.
    """
    method = METHODS[config.algorithm]
    return method.build(parts(config, schedule, rate, decay_mask, axis_name))


def parts(
    config: ConfigDict,
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    decay_mask: Any = None,
    axis_name: AxisName = "replica",
) -> Parts:
    """What the config gives to its method; a method's numbers are those of its section."""
    method = METHODS[config.algorithm]
    clip, decay = _gradient_steps(config, decay_mask)
    if method.own_momentum and config.optimizer.decoupled and config.optimizer.weight_decay:
        raise ValueError(
            f"algorithm {config.algorithm} adds weight decay to the gradient: set "
            "optimizer.decoupled=False, or optimizer.weight_decay=0"
        )
    return Parts(
        schedule,
        rate,
        _local_optimizer(config, rate, decay_mask),
        axis_name,
        config.combine,
        config.mix_every,
        wire.of_dtype(config.comm_dtype),
        gradient=optax.chain(clip, decay),
        optimizer=config.optimizer.to_dict(),
        identical_start=config.identical_start,
        numbers=_numbers(config, method),
    )


def optimizer_name(config: ConfigDict) -> str:
    """The local optimizer: ``optimizer.name``, or where it is empty the algorithm's first."""
    allowed, name = METHODS[config.algorithm].optimizers, config.optimizer.name
    if name and name not in allowed:
        raise ValueError(
            f"algorithm {config.algorithm} works with optimizer.name {' or '.join(allowed)}, got "
            f"{name!r}; leave optimizer.name empty for {allowed[0]}"
        )
    return name or allowed[0]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one replica sends and keeps, in bytes."""

    sent_a_step: float  # by the busiest replica to all its neighbours, averaged over a period
    sent_by_node: float  # by the busiest node of ``local_size`` replicas to other nodes, likewise
    state: int  # parameters, optimizer and method


def cost(config: ConfigDict, schedule: Schedule, state: Any) -> Cost:
    """The cost of a `TrainState`, or of its shapes, with the leading replica dimension."""
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    held, model = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        for tree in (own, own.params)
    )
    every = 1
    if config.algorithm == "all_reduce":
        schedule = topology.make("complete", schedule.num_replicas)
    else:
        method = METHODS[config.algorithm]
        model = method.message_bytes(own.params, parts(config, schedule, 1.0))
        every = config.mix_every
    by_node = schedule.bytes_sent_by_nodes(model, config.local_size)
    return Cost(schedule.bytes_sent(model) / every, by_node / every, held)


def describe(config: ConfigDict, schedule: Schedule, cost: Cost) -> str:
    """What the algorithm sends and keeps, in one sentence for the start of a run."""
    sent, by_node, state = (
        f"{format_number(number / 1e6)} MB" for number in dataclasses.astuple(cost)
    )
    over = "" if config.algorithm == "all_reduce" else f" over {schedule.name}"
    node = ""
    if config.local_size > 1:
        node = f" (a node of {config.local_size} sends {by_node} to other nodes)"
    return (
        f"{config.algorithm}{over}: a replica sends {sent} per step{node} and "
        f"keeps {state} of parameters and optimizer"
    )


def _numbers(config: ConfigDict, method: Method) -> dict[str, Any]:
    if not method.numbers:
        return {}
    name = method.config_section
    if name and name not in config:
        raise ConfigError(
            f"the config has no section {name!r}, whose numbers {method.name} needs; import the "
            "module that registers it before default_config() is called"
        )
    section = config[name] if name else config
    return {number: section[number] for number in method.numbers}


def _local_optimizer(config: ConfigDict, rate: optax.ScalarOrSchedule, decay_mask: Any):
    chosen, name = config.optimizer, optimizer_name(config)
    clip, decay = _gradient_steps(config, decay_mask)
    if name == "sgd":
        before, after = (optax.identity(), decay) if chosen.decoupled else (decay, optax.identity())
        trace = optax.trace(chosen.momentum) if chosen.momentum else optax.identity()
        return optax.chain(clip, before, trace, after, optax.scale_by_learning_rate(rate))
    make = optim.accum_adamw if chosen.decoupled else optim.accum_adam
    window = config.accum_steps if name == "accum_adam" else 1
    inner = make(rate, chosen.b1, chosen.b2, chosen.eps, chosen.weight_decay, decay_mask, window)
    return optax.chain(clip, inner) if chosen.clip_norm else inner


def _gradient_steps(config: ConfigDict, decay_mask: Any):
    """(clipping, weight decay), each the identity where the config has none."""
    norm, decay = config.optimizer.clip_norm, config.optimizer.weight_decay
    return (
        optax.clip_by_global_norm(norm) if norm else optax.identity(),
        optax.add_decayed_weights(decay, decay_mask) if decay else optax.identity(),
    )
