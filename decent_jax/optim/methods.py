"""Every method by its name: what it is made of, where it is valid, what it sends and keeps.

>>> from decent_jax import topology
>>> parts = Parts(topology.make("bidirectional_ring", 8), 0.1, optax.sgd(0.1))
>>> tx = METHODS["gradient_tracking"].build(parts)
>>> METHODS["gradient_tracking"].messages, METHODS["gradient_tracking"].copies
(2, 2)
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax

from decent_jax.gossip import AxisName
from decent_jax.gossip import wire as wires
from decent_jax.gossip.wire import Wire
from decent_jax.optim import corrected, momentum, outer, require
from decent_jax.optim.choco import choco
from decent_jax.optim.decentralized import all_reduce, decentralized
from decent_jax.optim.swarm import Lattice, swarm
from decent_jax.topology import Schedule


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a method is made of.

    schedule: of the rounds that ``update`` will be given.
    learning_rate: a float or an optax schedule of the step.
    inner: the local optimizer with this learning rate, for the methods that take one.
    axis_name, combine, wire: as in `decent_jax.optim.decentralized`; combine "" is the method's.
    mix_every: steps between two rounds, as the caller's loop has it.
    gradient: what the methods with a momentum of their own do to gradients first.
    momentum, b1, b2, eps: of those methods.
    identical_start: whether all replicas begin with the same parameters.
    numbers: the method's own, see `Method.numbers`.
    """

    schedule: Schedule
    learning_rate: optax.ScalarOrSchedule
    inner: optax.GradientTransformation
    axis_name: AxisName = "replica"
    combine: str = ""
    mix_every: int = 1
    wire: Wire | None = None
    gradient: optax.GradientTransformation | None = None
    momentum: float = 0.9
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    identical_start: bool = True
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method, and what it declares.

    make: from `Parts` and the numbers to the transformation.
    optimizers: local optimizers it works with (the first is its default): "adam", "accum_adam",
      "sgd"; with ``own_momentum`` they name the method's own form.
    orders: combine orders it has, the first its default.
    messages: arrays of the parameters' size that a replica sends to each neighbour in a round.
    copies: arrays of the parameters' size in its state, besides the local optimizer's.
    numbers: its own numbers and their defaults.
    any_wire: whether ``comm_dtype`` may be other than float32.
    """

    make: Callable[..., optax.GradientTransformationExtraArgs]
    optimizers: tuple[str, ...] = ("sgd", "adam", "accum_adam")
    orders: tuple[str, ...] = ("then",)
    messages: int = 1
    copies: int | Callable[[Parts, Mapping], int] = 0
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    any_wire: bool = True
    own_momentum: bool = False

    def build(self, parts: Parts) -> optax.GradientTransformationExtraArgs:
        """The method as an optax transformation.

        Raises:
          ValueError: a number it does not have, an order, a format or a schedule it is not valid
            with; the sentence names both.
        """
        unknown = set(parts.numbers) - set(self.numbers)
        if unknown:
            raise ValueError(
                f"{self.name} has no number {sorted(unknown)[0]!r}; it has "
                f"{', '.join(self.numbers) or 'none'}"
            )
        if parts.combine and parts.combine not in self.orders:
            raise ValueError(
                f"{self.name} has only combine={' or '.join(map(repr, self.orders))}, got "
                f"{parts.combine!r}; leave combine empty"
            )
        if parts.wire is not None and not self.any_wire:
            raise ValueError(f"{self.name} sends float32 or a format of its own: leave comm_dtype")
        parts = dataclasses.replace(parts, combine=parts.combine or self.orders[0])
        return self.make(parts, {**self.numbers, **parts.numbers})

    @property
    def name(self) -> str:
        return next(name for name, method in METHODS.items() if method is self)

    def memory_copies(self, parts: Parts) -> int:
        """Copies of the parameters in the state, besides the local optimizer's."""
        if callable(self.copies):
            return self.copies(parts, {**self.numbers, **parts.numbers})
        return self.copies

    def message_bytes(self, params: Any, parts: Parts) -> float:
        """Bytes a replica sends to one neighbour in a round, for parameters of these shapes.

        Flags, weights and checksums of a few bytes are not counted.
        """
        numbers = {**self.numbers, **parts.numbers}
        wire = parts.wire
        if "compressor" in numbers:
            wire = compressor(numbers["compressor"], numbers["fraction"])
        factor = numbers.get("bits", 32) / 32 / numbers.get("fragments", 1)
        sizes = [
            4 * leaf.size if wire is None else wire.bytes_sent(leaf.shape)
            for leaf in jax.tree.leaves(params)
        ]
        return self.messages * factor * sum(sizes)

    def bytes_sent(self, params: Any, parts: Parts) -> float:
        """Bytes the busiest replica sends a step, averaged over a period of the schedule."""
        return parts.schedule.bytes_sent(self.message_bytes(params, parts)) / parts.mix_every

    def bytes_sent_by_nodes(self, params: Any, parts: Parts, local_size: int) -> float:
        """Bytes the busiest node of ``local_size`` replicas sends to others, in the same way."""
        model = self.message_bytes(params, parts)
        return parts.schedule.bytes_sent_by_nodes(model, local_size) / parts.mix_every


def compressor(name: str, fraction: float) -> Wire:
    """The format that ``choco`` compresses with, by its name."""
    made = {
        "top_k": lambda: wires.TopK(fraction),
        "random_k": lambda: wires.RandomK(fraction),
        "int8": wires.Int8,
    }
    if name not in made:
        raise ValueError(f"choco.compressor must be one of {', '.join(made)}, got {name!r}")
    if not 0 < fraction <= 1:
        raise ValueError(f"choco.fraction must be above 0 and at most 1, got {fraction}")
    return made[name]()


def _decentralized(parts, numbers):
    return decentralized(
        parts.inner,
        parts.schedule,
        parts.combine,
        parts.axis_name,
        gamma=numbers["gamma"],
        wire=parts.wire,
    )


def _around_inner(make):
    """Methods that wrap any local optimizer and have no numbers."""

    def build(parts, numbers):
        del numbers
        return make(parts.inner, parts.schedule, parts.axis_name, wire=parts.wire)

    return build


def _exact_diffusion(parts, numbers):
    del numbers
    return corrected.exact_diffusion(
        parts.inner, parts.schedule, parts.axis_name, mix_every=parts.mix_every, wire=parts.wire
    )


def _d2(parts, numbers):
    del numbers
    require.static_and_symmetric("d2", parts.schedule, parts.mix_every)
    return corrected.d2(parts.inner, parts.schedule, parts.axis_name, wire=parts.wire)


def _quasi_global_sgd(parts, numbers):
    return momentum.quasi_global_sgd(
        parts.learning_rate,
        parts.schedule,
        parts.momentum,
        numbers["mu"],
        parts.axis_name,
        gradient=parts.gradient,
        wire=parts.wire,
    )


def _quasi_global_adam(parts, numbers):
    del numbers
    return momentum.quasi_global_adam(
        parts.learning_rate,
        parts.schedule,
        parts.b1,
        parts.b2,
        parts.eps,
        parts.axis_name,
        gradient=parts.gradient,
        wire=parts.wire,
    )


def _decentlam(parts, numbers):
    del numbers
    require.static_and_symmetric("decentlam", parts.schedule, parts.mix_every)
    return momentum.decentlam(
        parts.learning_rate,
        parts.schedule,
        parts.momentum,
        parts.axis_name,
        gradient=parts.gradient,
        wire=parts.wire,
    )


def _slowmo(parts, numbers):
    return outer.slowmo(
        parts.inner,
        parts.schedule,
        parts.learning_rate,
        numbers["alpha"],
        numbers["beta"],
        parts.axis_name,
        wire=parts.wire,
    )


def _diloco(parts, numbers):
    return outer.diloco(
        parts.inner,
        parts.schedule,
        optax.sgd(numbers["outer_learning_rate"], numbers["outer_momentum"], nesterov=True),
        parts.axis_name,
        fragments=numbers["fragments"],
        mix_every=parts.mix_every,
        delay=numbers["delay"],
        alpha=numbers["alpha"],
    )


def _choco(parts, numbers):
    return choco(
        parts.inner,
        parts.schedule,
        compressor(numbers["compressor"], numbers["fraction"]),
        numbers["gamma"],
        parts.axis_name,
        identical_start=parts.identical_start,
    )


def _swarm(parts, numbers):
    bits = numbers["bits"]
    if bits not in (8, 16, 32):
        raise ValueError(f"swarm.bits must be 8, 16 or 32 (not quantised), got {bits}")
    return swarm(
        parts.inner,
        parts.schedule,
        parts.axis_name,
        blocking=parts.combine == "then",
        lattice=None if bits == 32 else Lattice(bits),
    )


def _all_reduce(parts, numbers):
    del numbers
    return all_reduce(parts.inner, parts.axis_name)


_GAMMA = {"gamma": 1.0}
_BOTH = ("with", "then")

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "all_reduce": Method(_all_reduce, ("adam", "sgd", "accum_adam"), _BOTH, any_wire=False),
        "decentralized_adam": Method(_decentralized, ("adam",), _BOTH, numbers=_GAMMA),
        "accum_adam": Method(_decentralized, ("accum_adam",), _BOTH, numbers=_GAMMA),
        "decentralized_sgd": Method(_decentralized, ("sgd",), _BOTH, numbers=_GAMMA),
        "gossiped_momentum": Method(_around_inner(momentum.gossiped_momentum), messages=2),
        "quasi_global_sgd": Method(
            _quasi_global_sgd, ("sgd",), copies=1, numbers={"mu": 0.9}, own_momentum=True
        ),
        "quasi_global_adam": Method(_quasi_global_adam, ("adam",), copies=2, own_momentum=True),
        "decentlam": Method(_decentlam, ("sgd",), copies=1, own_momentum=True),
        "exact_diffusion": Method(_exact_diffusion, copies=1),
        "d2": Method(_d2, copies=1),
        "gradient_tracking": Method(
            _around_inner(corrected.gradient_tracking), orders=("with",), messages=2, copies=2
        ),
        "push_sum": Method(_around_inner(corrected.push_sum), any_wire=False),
        "slowmo": Method(_slowmo, copies=2, numbers={"alpha": 1.0, "beta": 0.7}, any_wire=False),
        "diloco": Method(
            _diloco,
            ("adam", "sgd", "accum_adam"),
            copies=lambda parts, numbers: 2 + (numbers["delay"] > 1),
            numbers={
                "fragments": 1,
                "delay": 0,
                "alpha": 0.0,
                "outer_learning_rate": 0.7,
                "outer_momentum": 0.9,
            },
            any_wire=False,
        ),
        "choco": Method(
            _choco,
            copies=2,
            numbers={"compressor": "top_k", "fraction": 0.1, "gamma": 0.2},
            any_wire=False,
        ),
        "swarm": Method(
            _swarm,
            orders=_BOTH,
            copies=lambda parts, numbers: int((parts.combine or "with") == "with"),
            numbers={"bits": 32},
            any_wire=False,
        ),
    }
)
