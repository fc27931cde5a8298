"""The algorithm of a config as an optax transformation, and what it costs."""

import dataclasses
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from decent_jax import optim, topology
from decent_jax.gossip import wire
from decent_jax.optim import METHODS, Method, Parts
from decent_jax.text import format_number
from decent_jax.topology import Schedule

SECTIONS = ("slowmo", "diloco", "choco", "swarm")  # of the config, named like their method


def transformation(
    config: ConfigDict,
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    decay_mask: Any = None,
    axis_name: Any = "replica",
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
    axis_name: Any = "replica",
) -> Parts:
    """What the config's method is made of."""
    method, chosen = METHODS[config.algorithm], config.optimizer
    return Parts(
        schedule,
        rate,
        _local_optimizer(config, method, rate, decay_mask),
        axis_name,
        config.combine,
        config.mix_every,
        wire.of_dtype(config.comm_dtype),
        gradient=_gradient(config, decay_mask) if method.own_momentum else None,
        momentum=chosen.momentum,
        b1=chosen.b1,
        b2=chosen.b2,
        eps=chosen.eps,
        identical_start=config.identical_start,
        numbers=_numbers(config, method, rate),
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
    """Of a `TrainState`, or shapes of one, with the leading replica dimension."""
    method = METHODS[config.algorithm]
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own))
    if config.algorithm == "all_reduce":
        mean = topology.make("complete", schedule.num_replicas)
        model = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own.params))
        by_node = mean.bytes_sent_by_nodes(model, config.local_size)
        return Cost(mean.bytes_sent(model), by_node, held)
    made_of = parts(config, schedule, 1.0)
    by_node = method.bytes_sent_by_nodes(own.params, made_of, config.local_size)
    return Cost(method.bytes_sent(own.params, made_of), by_node, held)


def describe(config: ConfigDict, schedule: Schedule, cost: Cost) -> str:
    """What the algorithm sends and keeps, in one sentence for the start of a run."""

    def megabytes(number):
        return f"{format_number(number / 1e6)} MB"

    over = "" if config.algorithm == "all_reduce" else f" over {schedule.name}"
    node = ""
    if config.local_size > 1:
        node = (
            f" (a node of {config.local_size} sends {megabytes(cost.sent_by_node)} to other nodes)"
        )
    return (
        f"{config.algorithm}{over}: a replica sends {megabytes(cost.sent_a_step)} a step{node} and "
        f"keeps {megabytes(cost.state)} of parameters and optimizer"
    )


def _local_optimizer(config, method: Method, rate, decay_mask):
    chosen, name = config.optimizer, optimizer_name(config)
    if name == "sgd":
        return optax.chain(
            _clipping(config),
            optax.identity() if chosen.decoupled else _decay(config, decay_mask),
            optax.trace(chosen.momentum) if chosen.momentum else optax.identity(),
            _decay(config, decay_mask) if chosen.decoupled else optax.identity(),
            optax.scale_by_learning_rate(rate),
        )
    make = optim.accum_adamw if chosen.decoupled else optim.accum_adam
    window = config.accum_steps if name == "accum_adam" else 1
    inner = make(rate, chosen.b1, chosen.b2, chosen.eps, chosen.weight_decay, decay_mask, window)
    return optax.chain(_clipping(config), inner) if chosen.clip_norm else inner


def _gradient(config, decay_mask):
    """What is done to the gradient of a method with a momentum of its own."""
    if config.optimizer.decoupled and config.optimizer.weight_decay:
        raise ValueError(
            f"algorithm {config.algorithm} adds weight decay to the gradient: set "
            "optimizer.decoupled=False, or optimizer.weight_decay=0"
        )
    return optax.chain(_clipping(config), _decay(config, decay_mask))


def _clipping(config):
    norm = config.optimizer.clip_norm
    return optax.clip_by_global_norm(norm) if norm else optax.identity()


def _decay(config, decay_mask):
    decay = config.optimizer.weight_decay
    return optax.add_decayed_weights(decay, decay_mask) if decay else optax.identity()


def _numbers(config, method: Method, rate) -> dict[str, Any]:
    numbers = config[config.algorithm].to_dict() if config.algorithm in SECTIONS else {}
    if "mu" in method.numbers:
        numbers["mu"] = config.quasi_global.mu
    if "gamma" in method.numbers and config.algorithm not in SECTIONS:
        numbers["gamma"] = _consensus_factor(config, rate)
    return numbers


def _consensus_factor(config, rate):
    """``gamma``, or ``gamma (rate / peak) ** gamma_power`` of the step (DSGD-AC)."""
    if not config.gamma_power:
        return config.gamma
    peak = config.learning_rate or 1.0
    return lambda count: config.gamma * (rate(count) / peak) ** config.gamma_power
