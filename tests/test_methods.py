"""Every method on every kind of schedule is its recursion, or says why it cannot be."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from jax.sharding import PartitionSpec as P

from decent_jax import optim, topology
from decent_jax.gossip import wire
from decent_jax.optim import METHODS, Parts

N, D, STEPS, MOMENTUM = 8, 6, 7, 0.9


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def rate(step):
    return 0.1 / (1 + 0.2 * step)


SGD, SGDM = optax.sgd(rate), optax.sgd(rate, momentum=MOMENTUM)


@dataclasses.dataclass(frozen=True)
class Case:
    """A method with its numbers, and its name and numbers among the oracles."""

    method: str
    oracle: str
    inner: optax.GradientTransformation = SGD
    combine: str = ""
    numbers: dict = dataclasses.field(default_factory=dict)
    wanted: dict = dataclasses.field(default_factory=dict)


def top_of_each_array(row):
    """A third of each of the two arrays of `split`: one number."""
    return np.concatenate([oracles.top(1)(row[: D - 2]), oracles.top(1)(row[D - 2 :])])


CASES = {
    "dpsgd-with": Case("decentralized_sgd", "dpsgd", combine="with", wanted={"combine": "with"}),
    "dpsgd-then": Case("decentralized_sgd", "dpsgd", combine="then", wanted={"combine": "then"}),
    "gamma": Case(
        "decentralized_sgd",
        "dpsgd",
        combine="with",
        numbers={"gamma": lambda t: 1 / (1 + 0.5 * t)},
        wanted={"combine": "with", "gamma": lambda t: 1 / (1 + 0.5 * t)},
    ),
    "dmsgd": Case("decentralized_sgd", "dmsgd", SGDM, combine="then"),
    "accum_adam": Case(
        "accum_adam",
        "accum_adam",
        optim.accum_adamw(rate, 0.8, 0.9, 1e-3, 0.1, accum_steps=3),
        combine="with",
        wanted={"b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
        | {"accum_steps": 3, "combine": "with"},
    ),
    "gossiped_momentum": Case("gossiped_momentum", "gossiped_momentum", SGDM),
    "quasi_global_sgd": Case(
        "quasi_global_sgd", "quasi_global_sgd", numbers={"mu": 0.8}, wanted={"mu": 0.8}
    ),
    "quasi_global_adam": Case("quasi_global_adam", "quasi_global_adam"),
    "decentlam": Case("decentlam", "decentlam"),
    "exact_diffusion": Case("exact_diffusion", "exact_diffusion"),
    "d2": Case("d2", "d2"),
    "gradient_tracking": Case("gradient_tracking", "gradient_tracking"),
    "push_sum": Case("push_sum", "push_sum"),
    "slowmo": Case(
        "slowmo", "slowmo", numbers={"alpha": 0.9, "beta": 0.6}, wanted={"alpha": 0.9, "beta": 0.6}
    ),
    "choco": Case(
        "choco",
        "choco",
        numbers={"fraction": 1 / 3, "gamma": 0.4},
        wanted={"compress": top_of_each_array, "gamma": 0.4},
    ),
}
KINDS = {  # (schedule, mix_every): static or varying, directed or not, with averages, push only
    "static": ("bidirectional_ring", 1),
    "directed": ("static_exp", 1),
    "varying": ("one_peer_exp", 1),
    "pairs": ("hypercube", 1),
    "seldom": ("bidirectional_ring", 2),
    "average": ("complete", 2),
    "periodic": ("periodic_average(hypercube, every=2)", 1),
    "push": ("random_out", 1),
}
NOT_PUSH = {"push": "do not sum to 1"}
STATIC_ONLY = NOT_PUSH | {
    "directed": "symmetric mixing matrix",
    "varying": "diverges with one_peer_exp",
    "pairs": "diverges with hypercube",
    "seldom": "diverges with mix_every=2",
    "average": "diverges with mix_every=2",
    "periodic": "diverges with periodic_average",
}
NO_AVERAGE = dict.fromkeys(("static", "directed", "varying", "pairs", "seldom"), "does not do")
REFUSED = dict.fromkeys(CASES, NOT_PUSH) | {
    "push_sum": {},
    "decentlam": STATIC_ONLY,
    "d2": STATIC_ONLY,
    "slowmo": NOT_PUSH | NO_AVERAGE,
    "choco": NOT_PUSH
    | dict.fromkeys(("varying", "pairs", "periodic"), "changes them")
    | {"average": "averages in groups"},
}


def parts_of(case, kind):
    name, mix_every = KINDS[kind]
    return Parts(
        topology.make(name, N),
        rate,
        case.inner,
        combine=case.combine,
        mix_every=mix_every,
        identical_start=False,
        numbers=case.numbers,
    )


def build(case, kind, **changes):
    with warnings.catch_warnings():  # the ring of 8 is at the bound of D2, see test_refusals
        warnings.filterwarnings("ignore", message=".*the bound of its")
        return METHODS[case.method].build(dataclasses.replace(parts_of(case, kind), **changes))


def problem(seed=0):
    """Start (n, D), and the gradient a (x - b_t) with another b at every step."""
    rng = np.random.default_rng(seed)
    x0, a = rng.normal(size=(N, D)), rng.uniform(0.2, 1, (N, 1))
    b = rng.normal(size=(STEPS, N, D))
    return x0, a, b


def simulated(case, kind, problem):
    x0, a, b = problem
    schedule, mix_every = parts_of(case, kind).schedule, KINDS[kind][1]

    def matrices(t):
        r = schedule.round_at(t, mix_every)
        return None if r is None else schedule.matrix(r)

    def grad(x, t):
        return a * (x - b[t])

    return oracles.run(case.oracle, matrices, grad, x0, STEPS, rate, **case.wanted)


def one_step(tx, round):
    """A step of one replica whose parameters are two arrays: (D - 2,) and (2, 1)."""

    def step(x, state, a, b):
        grads = jax.tree.map(lambda x, b: a * (x - b), x, split(b))
        updates, state = tx.update(grads, state, x, round=round)
        return optim.apply_updates(x, updates), state

    return step


def split(row):
    return {"one": row[: D - 2], "two": row[D - 2 :].reshape(2, 1)}


def joined(x):
    return np.concatenate([np.asarray(x["one"]), np.asarray(x["two"]).reshape(N, 2)], axis=1)


def run(case, kind, problem, mesh=None):
    x0, a, b = problem
    axis = "replica"
    tx = build(case, kind, axis_name=axis)
    schedule, mix_every = parts_of(case, kind).schedule, KINDS[kind][1]
    x = jax.vmap(split)(jnp.asarray(x0))
    state = jax.vmap(tx.init)(x)
    executables, history = {}, []
    for t in range(STEPS):
        r = schedule.round_at(t, mix_every)
        if r not in executables:
            if mesh is None:
                executables[r] = jax.vmap(one_step(tx, r), axis_name="replica")
            else:
                executables[r] = jax.jit(on_mesh(one_step(tx, r), mesh, schedule))
        x, state = executables[r](x, state, jnp.asarray(a[:, 0]), jnp.asarray(b[t]))
        history.append(joined(x))
    return np.stack(history)


def on_mesh(step, mesh, schedule):
    def body(*args):
        own = step(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], own)

    spec = P("replica")
    return jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=not schedule.partial_groups
    )


VALID = [(case, kind) for case in CASES for kind in KINDS if kind not in REFUSED[case]]
INVALID = [(case, kind) for case in CASES for kind in REFUSED[case]]


def test_every_method_has_a_case():
    """DiLoCo and SwarmSGD have files of their own; the rest is here."""
    tested = {case.method for case in CASES.values()}
    assert tested | {"all_reduce", "decentralized_adam", "diloco", "swarm"} == set(METHODS)


@pytest.mark.parametrize(("name", "kind"), VALID)
def test_vmap_is_the_recursion(name, kind):
    given = problem()
    wanted = simulated(CASES[name], kind, given)
    got = run(CASES[name], kind, given)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)


# A layout differs in `gossip` only, so a kind of schedule a method is enough there.
ON_DEVICES = [
    (name, [k for k in KINDS if (name, k) in VALID][i % 3])
    for i, name in enumerate(name for name in CASES if name not in ("d2", "decentlam", "slowmo"))
]
ON_DEVICES += [("d2", "static"), ("decentlam", "static"), ("slowmo", "periodic")]


@pytest.mark.parametrize(("name", "kind"), ON_DEVICES)
def test_devices_are_the_recursion(name, kind, mesh8):
    given = problem(seed=1)
    wanted = simulated(CASES[name], kind, given)
    np.testing.assert_allclose(run(CASES[name], kind, given, mesh8), wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("name", "kind"), INVALID)
def test_refusals_name_the_method_and_the_schedule(name, kind):
    case = CASES[name]
    with pytest.raises(ValueError, match=REFUSED[name][kind]) as error:
        build(case, kind)
    family = "decentralized" if case.oracle in ("dpsgd", "dmsgd", "accum_adam") else case.oracle
    assert str(error.value).startswith(family.removesuffix("_sgd").removesuffix("_adam"))


@pytest.mark.parametrize("name", ["one_peer_exp", "hypercube", "static_exp"])
def test_exact_diffusion_refuses_what_diverges(name):
    """The oracle diverges there, and with mixing in every step does not."""
    schedule, inner = topology.make(name, N), optax.sgd(0.1)
    optim.exact_diffusion(inner, schedule)
    with pytest.raises(ValueError, match=f"exact_diffusion diverges on {name} with mix_every=3"):
        optim.exact_diffusion(inner, schedule, mix_every=3)
    p = oracles.quadratic()
    far = {}
    for mix_every in (1, 3):
        rounds = [schedule.round_at(t, mix_every) for t in range(900)]
        matrices = [None if r is None else schedule.matrix(r) for r in rounds]
        x = oracles.run("exact_diffusion", matrices.__getitem__, p.grad, np.zeros((N, 1)), 900, 0.1)
        far[mix_every] = np.abs(x[-1] - p.optimum).max()
    assert far[1] < 1e-3 and far[3] > 1e3


def test_d2_at_its_bound():
    inner = optax.sgd(0.1)
    with pytest.warns(UserWarning, match="bidirectional_ring: the smallest eigenvalue is -1/3"):
        optim.d2(inner, topology.make("bidirectional_ring", 8))
    with pytest.raises(ValueError, match=r"d2 diverges on custom with 4 .*-0.600000 is below -1/3"):
        eye = np.eye(4)
        ring = 0.2 * eye + 0.4 * (np.roll(eye, 1, 0) + np.roll(eye, -1, 0))
        optim.d2(inner, topology.Schedule.from_matrices([ring]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.d2(inner, topology.make("bidirectional_ring", 7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outer_learning_rate": -1}, "diloco.outer_learning_rate must not be negative, got -1"),
        ({"outer_momentum": 1}, r"diloco.outer_momentum must be in \[0, 1\), got 1"),
    ],
)
def test_impossible_numbers_of_diloco(changes, message):
    parts = dataclasses.replace(parts_of(CASES["d2"], "average"), numbers=changes)
    with pytest.raises(ValueError, match=message):
        METHODS["diloco"].build(parts)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("d2", {"combine": "with"}, "d2 has only combine='then', got 'with'"),
        ("gradient_tracking", {"combine": "then"}, "gradient_tracking has only combine='with'"),
        ("push_sum", {"wire": wire.BFloat16()}, "push_sum sends float32"),
        ("slowmo", {"numbers": {"gamma": 1}}, "slowmo has no number 'gamma'; it has alpha, beta"),
        ("d2", {"numbers": {"beta": 1}}, "d2 has no number 'beta'; it has none"),
        ("choco", {"numbers": {"compressor": "zip"}}, "compressor must be one of top_k"),
        ("choco", {"numbers": {"fraction": 0}}, "fraction must be above 0 .* got 0"),
        ("choco", {"numbers": {"gamma": 2}}, "gamma must be above 0 and at most 1, got 2"),
        ("decentralized_sgd", {"numbers": {"gamma": -1}}, "gamma must not be negative, got -1"),
        ("slowmo", {"numbers": {"alpha": -1}}, "slowmo.alpha must not be negative, got -1"),
        ("slowmo", {"numbers": {"beta": 1}}, r"slowmo.beta must be in \[0, 1\), got 1"),
        ("quasi_global_sgd", {"numbers": {"mu": 1}}, r"quasi_global.mu must be in \[0, 1\), got 1"),
        ("decentlam", {"optimizer": {"momentum": 1}}, r"momentum must be in \[0, 1\), got 1"),
        ("quasi_global_adam", {"optimizer": {"b2": 1}}, r"b2 must be in \[0, 1\), got 1"),
        ("swarm", {"numbers": {"bits": 4}}, "swarm.bits must be 8, 16 or 32 .*, got 4"),
        ("diloco", {}, "diloco moves its outer .*bidirectional_ring does not do; use .*complete"),
        ("swarm", {}, "swarm lets replicas meet in pairs, and bidirectional_ring is not made of"),
    ],
)
def test_impossible_pairings(method, changes, message):
    parts = parts_of(CASES["d2"], "static")
    with pytest.raises(ValueError, match=message):
        METHODS[method].build(dataclasses.replace(parts, **changes))


def test_gossiped_momentum_needs_momentum():
    tx = optim.gossiped_momentum(optax.sgd(0.1), topology.make("ring", N))
    with pytest.raises(ValueError, match="gossiped_momentum needs an optimizer with momentum"):
        tx.init(jnp.zeros(2))


# --- the published values -------------------------------------------------------------------------

# Replicas 0, 1, 7 after 2 steps, and the largest error after 2000 (../shared/ALGORITHMS.md 4).
PUBLISHED = {
    "dpsgd-then": ([0.45454861, 0.15045139, 0.77260417], 0.5337),
    "dpsgd-with": ([0.24166667, 0.05770833, 1.03833333], 0.6275),
    "dmsgd": ([0.67204861, 0.18045139, 1.14010417], 2.032),
    "gossiped_momentum": (None, 1.322),
    "quasi_global_sgd": (None, 0.5337),
    "decentlam": ([0.67204861, 0.18045139, 1.14010417], 0.5337),
    "exact_diffusion": ([0.34519097, 0.10432292, 0.91064236], 0),
    "d2": (None, 0),
    "gradient_tracking": ([0.48333333, 0.06604167, 0.74666667], 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_heterogeneous_quadratic(name):
    p = oracles.quadratic()
    case = CASES[name]
    inner = optax.sgd(0.1, momentum=0.9 if case.inner is SGDM else None)
    numbers = {"mu": 0.9} if name == "quasi_global_sgd" else {}
    tx = build(case, "static", learning_rate=0.1, inner=inner, numbers=numbers)
    a, b = jnp.asarray(p.a), jnp.asarray(p.b)

    def step(carry, _):
        def one(x, state, a, b):
            updates, state = tx.update(a * (x - b), state, x, round=0)
            return optim.apply_updates(x, updates), state

        x, state = jax.vmap(one, axis_name="replica")(*carry, a, b)
        return (x, state), x

    x = jnp.zeros(N)
    _, history = jax.lax.scan(step, (x, jax.vmap(tx.init)(x)), length=2000)
    second, far = PUBLISHED[name]
    if second:
        np.testing.assert_allclose(history[1][np.array([0, 1, 7])], second, atol=1e-8)
    error = np.abs(np.asarray(history[-1]) - p.optimum).max()
    assert error == pytest.approx(far, abs=1e-9 if far == 0 else 6e-4)
