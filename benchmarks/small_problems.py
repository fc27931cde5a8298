"""Small problems on which all methods are compared, and the loop that runs any of them.

A run is one jitted scan on one device, replicas vmapped. The matrices of its rounds, the learning
rate and the data are arguments (`decent_jax.gossip.Simulated`), so a method is compiled once for
all graphs, losses of messages and learning rates. Methods that depend on the number of a round
(`Variant.numbered`) are compiled for one cycle of their schedule, unrolled.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax import optim, topology
from decent_jax.gossip import Simulated
from decent_jax.optim import METHODS, Parts
from decent_jax.simulate import lose
from decent_jax.topology import Schedule

RING, EXP = "bidirectional_ring", "one_peer_exp"
MOMENTUM = 0.9


# --- methods --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the tables.

    own: the schedules it is made for, where those are not the ring and the exponential graph.
    every: steps between two rounds.
    centre: the learning rate on images from which the search for the best sets out.
    """

    label: str
    method: str
    optimizer: str = "sgd"
    combine: str = ""
    numbers: tuple[tuple[str, Any], ...] = ()
    own: tuple[str, ...] = ()
    every: int = 1
    centre: float = 0.3

    @property
    def waits(self) -> bool:
        """Whether all replicas are averaged at once, and nothing is lost."""
        return self.method == "all_reduce" or "complete" in self.own

    @property
    def numbered(self) -> bool:
        return self.phases > 1 or self.method == "swarm"

    @property
    def phases(self) -> int:
        method = METHODS[self.method]
        return method.phases({**method.numbers, **dict(self.numbers)})

    def build(self, schedule: Schedule, rate: optax.ScalarOrSchedule):
        """The transformation; ValueError where the method is not valid on the schedule."""
        inner = {
            "sgd": lambda: optax.sgd(rate),
            "momentum": lambda: optax.sgd(rate, momentum=MOMENTUM),
            "adam": lambda: optax.adam(rate),
            "accum_adam": lambda: optim.accum_adamw(rate, weight_decay=0.0, accum_steps=2),
            "muon": lambda: optax.contrib.muon(rate, consistent_rms=0.2),
        }[self.optimizer]()
        return METHODS[self.method].build(self.parts(schedule, rate, inner))

    def parts(self, schedule: Schedule, rate: optax.ScalarOrSchedule, inner) -> Parts:
        return Parts(
            schedule,
            rate,
            inner,
            combine=self.combine,
            mix_every=self.every,
            optimizer={"momentum": MOMENTUM},
            numbers=dict(self.numbers),
        )

    def cycle(self, schedule: Schedule) -> tuple[int | None, ...]:
        """The rounds that are compiled, one after the other."""
        period = schedule.period if self.numbered else 1
        rounds = (schedule.round_at(t, self.every) for t in range(period * self.every))
        return tuple(None if r is None else r % period for r in rounds)

    def models_sent(self, schedule: Schedule, params) -> float:
        """By the busiest replica per step, in sizes of the model; a ring all-reduce sends two."""
        size = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
        if self.method == "all_reduce":
            return 2 * (1 - 1 / schedule.num_replicas)
        parts = self.parts(schedule, 0.1, optax.sgd(0.1))
        return METHODS[self.method].bytes_sent(params, parts) / size


AVERAGED = (f"periodic_average({RING}, every=8)", f"periodic_average({EXP}, every=8)")
PAIRS = ("random_matching",)
TOP = (("compressor", "top_k"), ("fraction", 0.1), ("gamma", 0.3))
INT8 = (("compressor", "int8"), ("gamma", 0.3))
WHOLE = {"own": ("complete",), "every": 4}
OUTER = {"own": ("random_matching(rounds=64)",), "every": 4}
VARIANTS = (
    Variant("all_reduce", "all_reduce", own=("complete",), centre=1.0),
    Variant("all_reduce, momentum", "all_reduce", "momentum", own=("complete",), centre=0.1),
    Variant("D-PSGD, with", "decentralized_sgd", combine="with"),
    Variant("D-PSGD, then", "decentralized_sgd", combine="then"),
    Variant("DmSGD, with", "decentralized_sgd", "momentum", "with", centre=0.1),
    Variant("DmSGD, then", "decentralized_sgd", "momentum", "then", centre=0.1),
    Variant("gossiped momentum", "gossiped_momentum", "momentum", centre=0.1),
    Variant("quasi-global SGD", "quasi_global_sgd", centre=0.3),
    Variant("exact diffusion", "exact_diffusion", centre=0.1),
    Variant("D2", "d2"),
    Variant("gradient tracking", "gradient_tracking", centre=0.1),
    Variant("push-sum", "push_sum"),
    Variant("push-sum, directed", "push_sum", own=("random_out",), centre=0.1),
    Variant("Gossip-PGA", "decentralized_sgd", combine="then", own=AVERAGED),
    Variant("Gossip-PGA, momentum", "decentralized_sgd", "momentum", "then", (), AVERAGED, 1, 0.1),
    Variant("local SGD", "decentralized_sgd", combine="then", **WHOLE),
    Variant("local SGD, momentum", "decentralized_sgd", "momentum", "then", centre=0.1, **WHOLE),
    Variant("DiLoCo", "diloco", centre=0.3, **WHOLE),
    Variant("CHOCO, top 10%", "choco", numbers=TOP),
    Variant("CHOCO, int8", "choco", numbers=INT8),
    Variant("swarm", "swarm", combine="with", own=PAIRS),
    Variant("swarm, blocking", "swarm", combine="then", own=PAIRS),
    Variant("swarm, 8 bit", "swarm", combine="with", numbers=(("bits", 8),), own=PAIRS),
    Variant("swarm, momentum", "swarm", "momentum", "with", own=PAIRS, centre=0.1),
    Variant("all_reduce, Adam", "all_reduce", "adam", own=("complete",), centre=0.01),
    Variant("decentralized Adam", "decentralized_adam", "adam", "with", centre=0.03),
    Variant("accumulated Adam", "accum_adam", "accum_adam", "with", centre=0.03),
    Variant("NoLoCo", "noloco", **OUTER),
    Variant("SparseLoCo", "sparseloco", **WHOLE),
    Variant("all_reduce, Muon", "all_reduce", "muon", own=("complete",), centre=0.03),
    Variant("Muon, with", "decentralized_sgd", "muon", "with", centre=0.03),
    Variant("MuLoCo", "diloco", "muon", centre=0.03, **WHOLE),
    Variant("SUDA-Muon", "gradient_tracking", "muon", "with", centre=0.03),
    Variant("DeMuon", "gradient_tracking", "muon", "then", centre=0.03),
)


class Pair(NamedTuple):
    """A variant on a schedule, or the library's reason against it."""

    variant: Variant
    name: str
    schedule: Schedule | None
    refusal: str = ""


def pair(variant: Variant, name: str, n: int) -> Pair:
    schedule = topology.repeat(topology.make(name, n), variant.phases)
    try:
        with warnings.catch_warnings():  # the ring of an even n is at the bound of D2's stability
            warnings.filterwarnings("ignore", message=".*the bound of its")
            variant.build(schedule, 0.1)
    except ValueError as error:
        return Pair(variant, name, None, str(error))
    return Pair(variant, name, schedule)


# --- rounds and their messages --------------------------------------------------------------------


def matrices(pair: Pair, steps: int, loss: float = 0.0, seed: int = 0) -> np.ndarray:
    """(steps, n, n): what is mixed in every step, after a part ``loss`` of messages was lost.

    Means over all replicas wait and lose nothing. A step that does not mix has the identity.
    """
    schedule, every = pair.schedule, pair.variant.every
    rounds = [schedule.round_at(t, every) for t in range(steps)]
    eye = np.eye(schedule.num_replicas)
    given = np.stack([eye if r is None else schedule.matrix(r) for r in rounds])
    if loss == 0 or pair.variant.waits:
        return given
    rule = "sender" if pair.variant.method == "push_sum" else "receiver"
    lossy = lose(given, loss, np.random.default_rng([seed, 7]), rule=rule)
    whole = [r is not None and schedule.rounds[r].group_size > 1 for r in rounds]
    return np.where(np.array(whole)[:, None, None], given, lossy)


# --- the loop -------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """gradient: (params, one replica's inputs of a step) -> (loss, gradients).

    decay: the factor of the learning rate at a 0-based step.
    observe: of the stacked parameters, recorded at regular steps.
    """

    gradient: Callable
    decay: Callable | None
    observe: Callable


@functools.cache
def _program(problem: Problem, variant: Variant, schedule: Schedule):
    """Jitted (rate, stacked start, matrices (E, C, c, n, n), inputs (E, C, c, n, ...)).

    E records of C cycles of c steps each.
    """
    cycle = variant.cycle(schedule)

    def run(rate, start, matrices, inputs):
        def rate_at(count):
            return rate * problem.decay(count)

        tx = variant.build(schedule, rate if problem.decay is None else rate_at)

        def one(round, x, state, inputs):
            loss, gradients = problem.gradient(x, inputs)
            updates, state = tx.update(gradients, state, x, round=round, value=loss)
            return optim.apply_updates(x, updates), state

        def whole_cycle(carry, given):
            for k, r in enumerate(cycle):
                mixed = None if r is None else Simulated(r, given[0][k])
                step = jax.vmap(functools.partial(one, mixed), axis_name="replica")
                carry = step(*carry, jax.tree.map(lambda x, k=k: x[k], given[1]))
            return carry, None

        def until_record(carry, given):
            carry, _ = jax.lax.scan(whole_cycle, carry, given)
            return carry, problem.observe(carry[0])

        carry = start, jax.vmap(tx.init)(start)
        (params, _), records = jax.lax.scan(until_record, carry, (matrices, inputs))
        return params, records

    return jax.jit(run)


def train(
    problem: Problem, pair: Pair, rate: float, start, mixing: np.ndarray, inputs, records: int
):
    """(stacked parameters at the end, records).

    mixing: (steps, n, n); inputs: pytree of (steps, n, ...).
    """
    variant, schedule = pair.variant, pair.schedule
    if not variant.numbered:  # the same program for all schedules
        schedule = _any_schedule(variant, schedule.num_replicas)
    length, steps = len(variant.cycle(schedule)), len(mixing)
    if steps % (records * length):
        raise ValueError(f"{steps} steps are not {records} records of cycles of {length}")

    def cut(x):
        return jnp.asarray(x).reshape(records, -1, length, *x.shape[1:])

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the bound of its")
        program = _program(problem, variant, schedule)
        rate = jnp.asarray(rate, jnp.result_type(float))
        mixing = mixing.astype(jnp.result_type(float))
        return jax.device_get(program(rate, start, cut(mixing), jax.tree.map(cut, inputs)))


@functools.cache
def _any_schedule(variant: Variant, n: int) -> Schedule:
    for name in (*variant.own, RING):
        found = pair(variant, name, n)
        if found.schedule is not None:
            return found.schedule
    raise ValueError(f"{variant.label} is valid on none of its schedules")


# --- a heterogeneous quadratic --------------------------------------------------------------------

QUADRATIC_REPLICAS, COORDINATES = 8, 10
OPTIMUM = 14 / 3


def _quadratic_gradient(x, inputs):
    a, b = inputs
    return jnp.sum(a * (x - b) ** 2) / 2, a * (x - b)


QUADRATIC = Problem(_quadratic_gradient, None, lambda x: x)


def quadratic(pair: Pair, rate: float, steps: int, loss: float = 0.0, seed: int = 0) -> np.ndarray:
    """(steps / c, n, COORDINATES) float64: the parameters after every cycle of c steps.

    f_i(x) = a_i ||x - b_i||^2 / 2 with a_i = (i + 1) / 8 and b_i = i, whose average has its optimum
    at 14/3 in each coordinate. Coordinate c begins at c, so that compressors have a choice.
    """
    n = QUADRATIC_REPLICAS
    i = np.arange(n)
    inputs = tuple(np.broadcast_to(x[:, None], (steps, n, 1)) for x in ((i + 1) / 8, i * 1.0))
    with jax.enable_x64(True):
        start = jnp.tile(jnp.arange(COORDINATES, dtype=float), (n, 1))
        records = steps // len(pair.variant.cycle(pair.schedule))
        mixing = matrices(pair, steps, loss, seed)
        return train(QUADRATIC, pair, rate, start, mixing, inputs, records)[1]
