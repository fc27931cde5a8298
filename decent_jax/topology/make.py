"""Schedules by name."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from decent_jax.ground import machine
from decent_jax.ground.extras import same_name
from decent_jax.ground.format import shown
from decent_jax.topology import graphs
from decent_jax.topology.rounds import Round, kron, round_of
from decent_jax.topology.schedule import Schedule, check_connected, check_matrix
from decent_jax.topology.spec import Spec, bind, parse, unnamed


def make(
    name: str, num_replicas: int, *, replicas_per_node: int = 1, **parameters: object
) -> Schedule:
    """The named schedule over ``num_replicas`` replicas.

    | name, with its parameters | a round | replicas |
    |---|---|---|
    | ``complete`` | all replicas average | any |
    | ``ring`` | disjoint neighbouring pairs, alternating sides (Decent-DP's ring) | even |
    | ``bidirectional_ring`` | i averages with i - 1 and i + 1, equal weights | any |
    | ``one_peer_exp`` | i receives from i - 2^r, weight 1/2 (Ying et al. 2021) | any |
    | ``hypercube`` | i pairs with i XOR 2^r (Decent-DP's one-peer-exp) | 2^k |
    | ``alternating_exp_ring`` | each node, then half of the node pairs j, j XOR 2^i | 2^k nodes |
    | ``static_exp`` | i receives from every i - 2^k, equal weights (Ying et al. 2021) | any |
    | ``base_k(max_degree=1)`` | groups of up to max_degree + 1 (Takezawa et al. 2023) | any |
    | ``grid(rows=...)`` | the neighbours in a rectangle | any |
    | ``torus(rows=...)`` | the neighbours in a rectangle that wraps around | any |
    | ``star`` | replica 0 with every other one | any |
    | ``random_matching(rounds=8, seed=0, degree=..., probability=1)`` | random pairs | any |
    | ``random_regular(degree=4, seed=0)`` | a random graph of equal degrees | n x degree even |
    | ``erdos_renyi(probability=..., seed=0)`` | a random graph of independent edges | any |
    | ``equi_dynamic(rounds=8, seed=0)`` | i receives from i - u, u random (Song 2022) | any |
    | ``hierarchical(complete, one_peer_exp)`` | inner in each node, outer across | whole nodes |
    | ``periodic_average(one_peer_exp, every=8)`` | inner; every 8th round is complete | any |
    | ``random_out(degree=..., seed=0)`` | i sends to random others; for push-sum | any |

    Write parameters in the name or pass them as keywords: ``make("base_k(max_degree=2)", 7)`` is
    ``make("base_k", 7, max_degree=2)``. `Schedule.name` contains them, so `make` builds the
    same schedule from it. With one replica, every name gives the identity.

    - ``grid``, ``torus``, ``star``, ``random_regular`` and ``erdos_renyi`` are one round with
      Metropolis-Hastings weights. By default, ``rows`` is the largest divisor of n up to sqrt(n) (a
      prime n gives a line, or a ring), ``probability`` is 2 ln(n) / n, and the ``degree`` of
      ``random_out`` is 2 up to 16 replicas, then about ln(n / 2).
    - Random schedules are drawn once, and a ``seed`` gives the same schedule on every machine.
      ``random_matching`` and ``equi_dynamic`` are cycles of ``rounds`` rounds, and **each round is
      compiled separately**: a step that compiles in a minute takes ``rounds`` minutes. On average a
      round multiplies the squared consensus distance by (n - 2) / (2 (n - 1)), or by 1/2 in
      ``random_matching`` with odd n, where one replica is idle.
    - ``equi_dynamic`` is OD-EquiDyn with all shifts; its ``(1 - eta) I + eta A`` mixes best with
      ``eta = 1/2``, which is used here. Shifts are drawn without repetition, so the period is at
      most n - 1.
    - ``hierarchical(inner, outer)`` groups replicas into nodes of ``replicas_per_node``. In round
      r, the replicas of a node mix with B, round r of ``inner``; then replica l mixes with the
      replicas l of other nodes, with A, round r of ``outer``. Together, W is the Kronecker product
      A (x) B. The period is the least common multiple of both periods, and ||W - J||, with J the
      exact average, is the larger of ||A - J|| and ||B - J||. With ``inner`` complete, a round is a
      mean over the node plus the messages of ``outer``. If ``inner`` sends d messages, a round
      sends (d + 1)(d_outer + 1) - 1.
    - ``random_matching(degree=r)`` takes its pairs from one random r-regular graph; a replica
      without a free neighbour is idle. With ``probability=p`` each pair averages with probability
      p, so the number of local steps between averages is geometric with mean 1/p.
    - ``periodic_average(inner, every)`` is Gossip-PGA (Chen et al. 2021). Rounds that repeat are
      compiled once.
    - The matrices of ``random_out`` are only column stochastic; use `decent_jax.optim.push_sum`.

    Only ``alternating_exp_ring`` and ``hierarchical`` use ``replicas_per_node``; the replicas of a
    node are consecutive. To choose a schedule, see `Schedule.summary` and ``docs/topologies.md``.

    Raises:
      ValueError: a name that cannot be parsed, an unknown schedule or parameter, a value out of
        range, or a number of replicas for which the schedule does not exist.

    >>> make("hierarchical(complete, one_peer_exp)", 8, replicas_per_node=4).matrix(0)[0]
    array([0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125])
    >>> make("random_regular(seed=1, degree=3)", 8).name
    'random_regular(degree=3, seed=1)'
    """
    _check_types(name, num_replicas, replicas_per_node)
    # Without parameters, the likelier mistake is the name.
    is_plain = "(" not in name and name.strip() not in _BUILDERS
    spec, build = _bound(Spec(name) if is_plain else parse(name), parameters)
    machine.check_memory(4 * 8 * num_replicas**2, f"a schedule of {num_replicas} replicas")
    if num_replicas < 1:
        raise ValueError(f"a schedule needs at least one replica, got {num_replicas}")
    if replicas_per_node < 1:
        raise ValueError(f"replicas_per_node must be at least 1, got {replicas_per_node}")
    if num_replicas == 1:
        return Schedule(str(spec), 1, (round_of(np.ones((1, 1))),))
    schedule = Schedule(str(spec), num_replicas, tuple(build(num_replicas, replicas_per_node)))
    for r, rnd in enumerate(schedule.rounds):
        check_matrix(rnd.matrix, num_replicas, r, spec.name in COLUMN_STOCHASTIC)
    check_connected(schedule.name, [rnd.matrix for rnd in schedule.rounds])
    return schedule


def _check_types(name: object, num_replicas: object, replicas_per_node: object) -> None:
    if not isinstance(name, str):
        raise ValueError(f"the name of a schedule must be a string, got {shown(name)}")
    for what, value in (("num_replicas", num_replicas), ("replicas_per_node", replicas_per_node)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{what} of a schedule must be a whole number, got {shown(value)}")


def repeat(schedule: Schedule, times: int) -> Schedule:
    """The schedule with its period repeated ``times`` times, as distinct rounds.

    For methods that treat each round differently (`decent_jax.optim.diloco` with fragments).

    >>> repeat(make("complete", 4), 3).period
    3
    """
    _check_rounds(schedule.name, times * schedule.period, schedule.num_replicas)
    rounds = tuple(dataclasses.replace(rnd) for _ in range(times) for rnd in schedule.rounds)
    return dataclasses.replace(schedule, rounds=rounds)


_ROUND_BYTES = 10_000  # memory of a round in addition to its matrix

_COMPLETE, _ONE_PEER_EXP = Spec("complete"), Spec("one_peer_exp")


def hierarchical(
    n: int, *, replicas_per_node: int, inner: Spec = _COMPLETE, outer: Spec = _ONE_PEER_EXP
) -> list[Round]:
    if replicas_per_node < 2 or n % replicas_per_node:
        raise ValueError(
            "replicas_per_node must be at least 2 and divide the number of replicas, got "
            f"{replicas_per_node}; set it to the number of replicas on a node"
        )
    inside, across = make(str(inner), replicas_per_node), make(str(outer), n // replicas_per_node)
    period = math.lcm(inside.period, across.period)
    _check_rounds("hierarchical", period, n)
    return [
        kron(across.rounds[r % across.period], inside.rounds[r % inside.period])
        for r in range(period)
    ]


def periodic_average(n: int, *, inner: Spec = _ONE_PEER_EXP, every: int = 8) -> list[Round]:
    (average,) = graphs.complete(n)
    rounds = make(str(inner), n).rounds
    return [
        average if (r + 1) % every == 0 else rounds[r % len(rounds)]
        for r in range(math.lcm(len(rounds), every))
    ]


Builder = Callable[..., Sequence[Round]]
_Build = Callable[[int, int], list[Round]]  # its arguments: n and replicas_per_node

_BUILDERS: dict[str, Builder] = {
    "complete": graphs.complete,
    "ring": graphs.ring,
    "bidirectional_ring": graphs.bidirectional_ring,
    "one_peer_exp": graphs.one_peer_exp,
    "hypercube": graphs.hypercube,
    "alternating_exp_ring": graphs.alternating_exp_ring,
    "static_exp": graphs.static_exp,
    "base_k": graphs.base_k,
    "grid": graphs.grid,
    "torus": graphs.torus,
    "star": graphs.star,
    "random_matching": graphs.random_matching,
    "random_regular": graphs.random_regular,
    "erdos_renyi": graphs.erdos_renyi,
    "equi_dynamic": graphs.equi_dynamic,
    "hierarchical": hierarchical,
    "periodic_average": periodic_average,
    "random_out": graphs.random_out,
}

COLUMN_STOCHASTIC = {"random_out"}  # rows do not sum to 1: for push-sum only
NAMES = tuple(name for name in _BUILDERS if name not in COLUMN_STOCHASTIC)
_BUILT_IN = frozenset(_BUILDERS)


def register(name: str, builder: Builder, *, column_stochastic: bool = False) -> None:
    """Registers your own topology under a name, for `make` and for configs.

    Args:
      name: an identifier that names no schedule yet.
      builder: ``builder(n, *, parameter=default) -> rounds``; its keyword-only parameters, with
        their annotated types, follow the name in parentheses (`make` passes
        ``replicas_per_node`` itself).
      column_stochastic: whether rows need not sum to 1, for `decent_jax.optim.push_sum` only.

    Raises:
      ValueError: the name is taken or not an identifier, or the function's first parameter is not
        ``n``. A function of the same name and module may register again, as in a notebook cell.
    """
    if not name.isidentifier():
        raise ValueError(f"the name of a schedule must be a word, got {name!r}")
    if name in _BUILT_IN or not same_name(builder, _BUILDERS.get(name, builder)):
        raise ValueError(f"there is already a schedule {name!r}; choose another name")
    if next(iter(inspect.signature(builder).parameters), "") != "n":
        raise ValueError(f"the first parameter of schedule {name!r}'s function must be called n")
    _BUILDERS[name] = builder
    if column_stochastic:
        COLUMN_STOCHASTIC.add(name)


def _check_rounds(name: str, rounds: int, n: int) -> None:
    """Raises ValueError if this machine's memory cannot hold so many rounds."""
    machine.check_memory(
        rounds * (8 * n * n + _ROUND_BYTES), f"{name} with {shown(rounds)} rounds of {n} replicas"
    )


def _bound(spec: Spec, keywords: Mapping[str, object]) -> tuple[Spec, _Build]:
    """The spec that becomes `Schedule.name`, and ``build(n, replicas_per_node)``.

    Checks everything that does not depend on n, in nested schedules too.
    """
    builder = _BUILDERS.get(spec.name)
    if builder is None:
        raise ValueError(
            f"unknown schedule {shown(spec.name)}; choose one of {', '.join(_BUILDERS)}"
        )
    kinds = dict(inspect.signature(builder).parameters)
    kinds.pop("n")
    needs_nodes = kinds.pop("replicas_per_node", None) is not None
    arguments = bind(spec, kinds, keywords)
    for key, value in arguments.items():
        if isinstance(value, Spec):
            arguments[key], _ = _bound(value, {})

    def build(n: int, replicas_per_node: int) -> list[Round]:
        for key in ("rounds", "every"):
            count: Any = arguments.get(key, 1)
            _check_rounds(spec.name, count, n)
            if count < 1:
                raise ValueError(
                    f"{spec.name} of {n} replicas: {key} must be at least 1, got {count}"
                )
        nodes = {"replicas_per_node": replicas_per_node} if needs_nodes else {}
        try:
            rounds = builder(n, **nodes, **arguments)
        except ValueError as error:
            raise ValueError(f"{spec.name} of {n} replicas: {error}") from None
        if not isinstance(rounds, list | tuple) or set(map(type, rounds)) - {Round}:
            raise ValueError(f"{spec.name} must give a list of rounds, got {shown(rounds)}")
        return list(rounds)

    return Spec(spec.name, unnamed(arguments, kinds)), build
