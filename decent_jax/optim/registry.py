"""The registry of methods: each is declared next to its factory.

A factory's signature defines the inputs of a method. Its positional parameters come from the run,
by name (`Parts`). Its keyword-only parameters are the method's hyperparameters
(`MethodSpec.numbers`), with their defaults and, in ``Annotated``, their help in a config; the
factory refuses values out of range. A dataclass among them, such as ``outer``, gives one
hyperparameter for each of its fields.

>>> import optax
>>> from decent_jax import topology
>>> from decent_jax.optim import METHODS
>>> parts = Parts(topology.make("bidirectional_ring", 8), 0.1, optax.sgd(0.1))
>>> tx = METHODS["gradient_tracking"].build(parts)
>>> METHODS["gradient_tracking"].messages, METHODS["gradient_tracking"].copies
(2, 2)
>>> METHODS["choco"].numbers
{'compressor': 'top_k', 'fraction': 0.1, 'gamma': 0.2}
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax

from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec, bytes_sent
from decent_jax.ground.extras import same_name
from decent_jax.ground.pytree import PyTree
from decent_jax.topology import Schedule, make

BOTH = ("awc", "atc")
ADAM_FIRST = ("adam", "sgd", "accum_adam", "muon")

Pairwise = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


Numbers = Mapping[str, Any]  # the numbers of a method or an optimizer, by name


@dataclasses.dataclass(frozen=True)
class Parts:
    """The arguments that a run passes to its method; a factory takes the fields it names.

    schedule: the schedule whose rounds are passed to ``update``.
    learning_rate: a float or an optax schedule of the step.
    inner: the local optimizer with this learning rate, for the methods that take one.
    axis_name, codec: as in `decent_jax.optim.decentralized`.
    combine: as in `decent_jax.optim.decentralized`; "" is the first of the method's orders.
    mix_every: steps between two rounds in the caller's loop.
    gradient: a transformation applied to gradients first, in methods with their own momentum.
    optimizer: momentum, b1, b2 and eps, for methods with their own momentum.
    same_init: whether all replicas start with the same parameters.
    seed: the seed of formats that a method creates itself; ``codec`` has its own seed.
    numbers: the method's hyperparameters, see `MethodSpec.numbers`.
    """

    schedule: Schedule
    learning_rate: optax.ScalarOrSchedule
    inner: optax.GradientTransformation
    axis_name: AxisName = "replica"
    combine: str = ""
    mix_every: int = 1
    codec: Codec | None = None
    gradient: optax.GradientTransformation | None = None
    optimizer: Numbers = dataclasses.field(default_factory=dict[str, object])
    same_init: bool = True
    seed: int = 0
    numbers: Numbers = dataclasses.field(default_factory=dict[str, object])


def coded_bytes(params: PyTree, codec: Codec | None) -> float:
    """Bytes of a message of all parameters in this format (None: uncompressed)."""
    return sum(
        leaf.size * leaf.dtype.itemsize if codec is None else bytes_sent(codec, leaf.shape)
        for leaf in jax.tree.leaves(params)
        if leaf.size  # empty arrays are not sent
    )


def model_bytes(params: PyTree, parts: Parts, numbers: Numbers) -> float:
    """Bytes of a message of all parameters in the run's format, as most methods send it."""
    return coded_bytes(params, parts.codec)


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """A registered method: its factory, its options and its costs.

    name: its name in `METHODS` and configs.
    make: the factory, which returns the transformation for its parts and hyperparameters.
    optimizers: local optimizers it works with (the first is its default): "adam", "accum_adam",
      "sgd", "muon". If the factory takes no ``inner``, they name the method's kind of optimizer.
    orders: its combine orders; the first is the default.
    messages: arrays of the parameters' size that a replica sends to each neighbour in a round.
    copies: arrays of the parameters' size in its state, in addition to the local optimizer's, with
      its default hyperparameters and order.
    section: the section of a config with its hyperparameters; None: named like the method; "": no
      section. Methods with the same hyperparameters may share one.
    sent: a function of the parameters, the parts and all hyperparameters that returns the bytes of
      one message, averaged over the rounds.
    phases: a function of all hyperparameters that returns how many rounds of a static schedule the
      method treats differently; configs repeat the schedule that many times.
    pairwise: None if the method needs rounds, or a function of all hyperparameters that returns the
      update of an asynchronous peer (`decent_jax.peers`) in a pairwise average: ``average(x, own,
      snapshot, pull) -> (x, own)``. It takes the current x and state of the method, the snapshot
      that the peer sent, and half (or the weighted share) of the partner's snapshot minus this one,
      so that ``snapshot + pull`` is the mean of both snapshots.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    optimizers: tuple[str, ...] = ("sgd", "adam", "accum_adam", "muon")
    orders: tuple[str, ...] = ("atc",)
    messages: int = 1
    copies: int = 0
    section: str | None = None
    sent: Callable[[PyTree, Parts, Numbers], float] = model_bytes
    phases: Callable[[Numbers], int] = lambda numbers: 1
    pairwise: Callable[[Numbers], Pairwise] | None = None

    @functools.cached_property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        """The factory's parameters by name."""
        return inspect.signature(self.make).parameters

    @property
    def numbers(self) -> dict[str, object]:
        """Its hyperparameters and their defaults: the factory's keyword-only parameters."""
        numbers: dict[str, object] = {}
        for p in self._own:
            parts = {f.name: getattr(p.default, f.name) for f in _fields(p)}
            numbers |= parts or {p.name: p.default}
        return numbers

    @property
    def _own(self) -> list[inspect.Parameter]:
        return [p for p in self.takes.values() if p.kind is p.KEYWORD_ONLY]

    @property
    def help(self) -> dict[str, str]:
        """The help of each hyperparameter: the text of its ``Annotated`` type."""
        types: dict[str, object] = {}
        for p in self._own:
            types |= {f.name: f.type for f in _fields(p)} or {p.name: p.annotation}
        return {name: getattr(of, "__metadata__", ("",))[0] for name, of in types.items()}

    @property
    def config_section(self) -> str:
        """The section of a config that holds its hyperparameters; "" for the config itself."""
        return self.name if self.section is None else self.section

    @property
    def own_momentum(self) -> bool:
        """Whether it is itself an optimizer, and takes gradients instead of an ``inner``."""
        return "inner" not in self.takes

    def build(self, parts: Parts) -> optax.GradientTransformationExtraArgs:
        """The method as an optax transformation.

        Raises:
          ValueError: a number out of range, or an unsupported order, format or schedule.
          TypeError: an unknown hyperparameter.
        """
        if parts.combine and parts.combine not in self.orders:
            raise ValueError(
                f"{self.name} has only combine={' or '.join(map(repr, self.orders))}, got "
                f"{parts.combine!r}; leave combine empty"
            )
        if parts.codec is not None and "codec" not in self.takes:
            raise ValueError(f"{self.name} sends float32 or its own format: leave codec unset")
        arguments = {**parts.optimizer, **vars(parts), "combine": parts.combine or self.orders[0]}
        own = dict(parts.numbers)
        for p in self._own:
            if fields := _fields(p):
                changed = {f.name: own.pop(f.name) for f in fields if f.name in own}
                own[p.name] = dataclasses.replace(p.default, **changed)
        of_run = (self.takes.keys() - {p.name for p in self._own}) & arguments.keys()
        return self.make(**{name: arguments[name] for name in of_run}, **own)

    def message_bytes(self, params: PyTree, parts: Parts) -> float:
        """Bytes a replica sends to one neighbour in a round, for parameters of these shapes.

        Flags, weights and checksums of a few bytes are not counted.
        """
        return self.messages * self.sent(params, parts, {**self.numbers, **parts.numbers})

    def bytes_sent(self, params: PyTree, parts: Parts, replicas_per_node: int = 1) -> float:
        """Bytes the busiest replica sends per step, averaged over a period of the schedule.

        With ``replicas_per_node`` above 1, bytes the busiest node sends to other nodes. A method
        without a schedule averages all replicas in every step.
        """
        schedule, every = parts.schedule, parts.mix_every
        if "schedule" not in self.takes:
            schedule, every = make("complete", schedule.num_replicas), 1
        message = self.message_bytes(params, parts)
        return schedule.bytes_sent(message, replicas_per_node=replicas_per_node) / every


def _fields(number: inspect.Parameter) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a dataclass among the hyperparameters; () for a plain number."""
    is_dataclass = dataclasses.is_dataclass(number.default)
    return dataclasses.fields(number.default) if is_dataclass else ()


_METHODS: dict[str, MethodSpec] = {}
METHODS: Mapping[str, MethodSpec] = MappingProxyType(_METHODS)  # every method by its name


def register(
    name: str, make: Callable[..., optax.GradientTransformationExtraArgs], **declared: Any
) -> MethodSpec:
    """Registers a method under its name, for `METHODS` and configs.

    Call it in the method's module. A config file that imports the module of your own method then
    has a section with the method's hyperparameters.

    Args:
      name, make: fields of `MethodSpec`.
      declared: other fields of `MethodSpec`.

    Raises:
      ValueError: the name is taken. A factory of the same name and module may register again, as
        in a notebook's cell.
    """
    spec = MethodSpec(name, make, **declared)
    if not same_name(make, _METHODS.get(name, spec).make):
        raise ValueError(f"there is already a method {name!r}; choose another name")
    _METHODS[name] = spec
    return spec
