"""Every method on every schedule is its recursion, or says why it cannot be."""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import oracles_seldom
import pytest
from refusals import refuses

from decent_jax import optim, topology
from decent_jax.gossip import codecs

N, D, STEPS, MOMENTUM = 8, 6, 8, 0.9
MASK = {"one": True, "two": False}

pytestmark = pytest.mark.usefixtures("x64")


def rate(step):
    return 0.1 / (1 + 0.2 * step)


ADAM = {"b1": 0.8, "b2": 0.9, "eps": 1e-3}
DECAY = {"weight_decay": np.where(np.arange(D) < D - 2, 0.1, 0.0), "accum_steps": 3}
SGD, SGDM = optax.sgd(rate), optax.sgd(rate, momentum=MOMENTUM)
L2 = optim.accum_adam(rate, **ADAM, weight_decay=0.1, mask=MASK, accum_steps=3)
DECOUPLED = optim.accum_adamw(
    rate, **ADAM, weight_decay=0.1, mask=lambda params: dict(MASK), accum_steps=3
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A method with its numbers; its oracle, which has the same ones, or those of ``wanted``."""

    method: str
    oracle: str | Callable
    inner: optax.GradientTransformation = SGD
    combine: str = ""
    numbers: dict = dataclasses.field(default_factory=dict)
    wanted: dict | None = None

    @property
    def of_oracle(self):
        order = {"combine": self.combine} if self.combine else {}
        return order | (self.numbers if self.wanted is None else self.wanted)


def top_of_each_array(row):
    """A third of each of the two arrays of `split`: one number."""
    return np.concatenate([oracles.top(1)(row[: D - 2]), oracles.top(1)(row[D - 2 :])])


def adam(combine, inner=DECOUPLED, **wanted):
    """Accumulated Adam in one order; two windows close in `STEPS`, and a third begins."""
    return Case("accum_adam", "accum_adam", inner, combine, wanted=ADAM | DECAY | wanted)


CASES = {
    "dpsgd-awc": Case("decentralized_sgd", "dpsgd", combine="awc"),
    "dpsgd-atc": Case("decentralized_sgd", "dpsgd", combine="atc"),
    "gamma": Case(
        "decentralized_sgd", "dpsgd", SGD, "awc", numbers={"gamma": lambda t: 1 / (1 + 0.5 * t)}
    ),
    "gamma-atc": Case(
        "decentralized_sgd", "dpsgd", SGD, "atc", numbers={"gamma": lambda t: 0.5 * t / (1 + t)}
    ),
    "dmsgd-awc": Case("decentralized_sgd", "dmsgd", SGDM, "awc"),
    "dmsgd-atc": Case("decentralized_sgd", "dmsgd", SGDM, "atc"),
    "accum_adamw-awc": adam("awc"),
    "accum_adamw-atc": adam("atc"),
    "accum_adam-awc": adam("awc", L2, decoupled=False),
    "accum_adam-atc": adam("atc", L2, decoupled=False),
    "adam-awc": dataclasses.replace(
        adam("awc", optax.adam(rate, **ADAM), weight_decay=0, accum_steps=1),
        method="decentralized_adam",
    ),
    "adam-atc": dataclasses.replace(
        adam("atc", optax.adam(rate, **ADAM), weight_decay=0, accum_steps=1),
        method="decentralized_adam",
    ),
    "gossiped_momentum": Case("gossiped_momentum", "gossiped_momentum", SGDM),
    "gossiped_momentum-awc": Case("gossiped_momentum", "gossiped_momentum", SGDM, "awc"),
    "quasi_global_sgd": Case("quasi_global_sgd", "quasi_global_sgd"),
    "exact_diffusion": Case("exact_diffusion", "exact_diffusion"),
    "d2": Case("d2", "d2"),
    "gradient_tracking": Case("gradient_tracking", "gradient_tracking"),
    "gradient_tracking-atc": Case("gradient_tracking", "gradient_tracking", combine="atc"),
    "push_sum": Case("push_sum", "push_sum"),
    "noloco": Case("noloco", oracles_seldom.noloco),
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
REFUSED = dict.fromkeys(CASES, NOT_PUSH) | {
    "push_sum": {},
    "d2": STATIC_ONLY,
    "choco": NOT_PUSH
    | dict.fromkeys(("varying", "pairs", "periodic"), "changes them")
    | {"average": "averages in groups"},
}


@functools.cache
def schedule_of(name, n=N):
    return topology.make(name, n, replicas_per_node=2)


def build(case, name, mix_every=1, n=N, **changes):
    equal = case.method == "sparseloco"
    given = {"combine": case.combine, "numbers": case.numbers, "same_init": equal} | changes
    schedule = schedule_of(name, n)
    with warnings.catch_warnings():  # the ring of 8 is at the bound of D2, see test_d2_at_its_bound
        warnings.filterwarnings("ignore", message=".*the bound of its")
        return schedule, harness.build(
            case.method,
            schedule,
            case.inner,
            rate,
            mix_every=mix_every,
            **given,
        )


def problem(n=N, seed=0):
    """Start (n, D), and the gradient a (x - b_t) with another b at every step."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, D)), rng.uniform(0.2, 1, (n, 1)), rng.normal(size=(STEPS, n, D))


def wanted_of(case, schedule, mix_every, given):
    x0, a, b = given

    def matrices(t):
        r = schedule.round_at(t, mix_every)
        return None if r is None else schedule.matrix(r)

    def grad(x, t):
        return a * (x - b[t])

    return oracles.run(case.oracle, matrices, grad, x0, STEPS, rate, **case.of_oracle)


def split(rows):
    """A replica's parameters are two arrays: (D - 2,) and (2, 1)."""
    rows = np.asarray(rows)
    return {"one": rows[..., : D - 2], "two": rows[..., D - 2 :, None]}


def joined(x):
    return np.concatenate([np.asarray(x["one"]), np.asarray(x["two"])[..., 0]], axis=-1)


def gradient(x, given):
    a, b = given
    return jax.tree.map(lambda x, b: a * (x - b), x, b)


def data_of(given):
    _, a, b = given
    return np.tile(a[:, 0], (STEPS, 1)), split(b)


def test_every_method_has_a_case():
    """DiLoCo and SwarmSGD have files of their own, those that read rounds are in test_outer."""
    tested = {case.method for case in CASES.values()}
    elsewhere = {"all_reduce", "diloco", "swarm", "sparseloco"}
    assert tested | elsewhere == set(harness.NAMES)


# Every schedule by name, mixing in every step and in every second one.
SCHEDULES = [(name, every) for name in (*topology.NAMES, "random_out") for every in (1, 2)]
# What a method runs on; methods with conditions run on fewer.
ENOUGH = dict.fromkeys(CASES, 33) | {"push_sum": 35, "exact_diffusion": 17}
ENOUGH |= {"d2": 3, "choco": 4, "noloco": 17}
KEEPS = ("choco", "noloco")  # act in rounds only, which no matrix says


def accepted(case):
    """The schedules that a method does not refuse."""
    found = []
    for name, mix_every in SCHEDULES:
        try:
            found.append((build(case, name, mix_every)[0], mix_every))
        except ValueError:
            continue
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_recursion(name):
    """On all schedules in one program, whose data are the matrices.

    CHOCO in a step that does not mix keeps what it has sent, which no matrix says; it runs on
    devices below, and so do outer steps.
    """
    case, given = CASES[name], problem()
    runs = [run for run in accepted(case) if name not in KEEPS or run[1] == 1]
    assert len(runs) >= ENOUGH[name]
    matrices = np.stack([harness.matrices_of(schedule, STEPS, every) for schedule, every in runs])
    schedule = runs[0][0]
    tx = build(case, schedule.name)[1]
    x = jax.tree.map(lambda x: np.tile(x, (len(runs), *[1] * x.ndim)), split(given[0]))
    got = joined(harness.simulated(tx, gradient, x, data_of(given), matrices))
    assert got.dtype == np.float64
    for history, (schedule, every) in zip(got, runs, strict=True):
        wanted = wanted_of(case, schedule, every, given)
        scale = max(1, np.abs(wanted).max())
        message = f"{schedule.name}, every {every}"
        np.testing.assert_allclose(history, wanted, rtol=0, atol=1e-11 * scale, err_msg=message)


# Rounds themselves, and steps without one. A layout lives in `gossip` only, so one schedule for
# each method is enough; (form, replicas, devices, schedule, mix_every).
LAYOUTS = {
    ("devices", 4, 4, "bidirectional_ring", 2): [
        *("gamma", "dmsgd-atc", "accum_adam-awc", "adam-atc", "gossiped_momentum"),
        "gossiped_momentum-awc",
        *("quasi_global_sgd", "gradient_tracking", "choco", "noloco"),
    ],
    ("devices", 4, 4, "bidirectional_ring", 1): ["d2", "exact_diffusion"],
    ("devices", 4, 4, "random_out", 2): ["push_sum"],
    ("devices", 4, 4, "periodic_average(hypercube, every=2)", 1): ["dmsgd-awc"],
    ("vmap", 4, 1, "complete", 2): ["dmsgd-atc"],
    ("block", 8, 4, "bidirectional_ring", 1): [
        *("accum_adamw-awc", "gradient_tracking", "quasi_global_sgd"),
    ],
}


def test_every_method_runs_on_devices():
    found = {CASES[name].method for names in LAYOUTS.values() for name in names}
    assert found == {case.method for case in CASES.values()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[3]}")
def test_rounds_are_the_recursion(layout):
    form, n, devices, name, mix_every = layout
    given, axis_name = problem(n, seed=1), harness.axis_of(form)
    names = LAYOUTS[layout]
    made = [build(CASES[key], name, mix_every, n, axis_name=axis_name) for key in names]
    schedule = made[0][0]
    tx = harness.together({key: tx for key, (_, tx) in zip(names, made, strict=True)})

    @functools.cache
    def executable(r):
        step = harness.step_of(tx, lambda xs, b: {k: gradient(x, b) for k, x in xs.items()}, r)
        check_vma = None if form == "block" or not schedule.partial_groups else False
        return harness.on_stack(step, form, n, devices, check_vma)

    x = {key: jax.tree.map(jnp.asarray, split(given[0])) for key in names}
    state, history = jax.vmap(tx.init)(x), []
    for t in range(STEPS):
        now = jax.tree.map(lambda b, t=t: jnp.asarray(b[t]), data_of(given))
        x, state = executable(schedule.round_at(t, mix_every))(x, state, now)
        history.append(x)
    for key in names:
        got = np.stack([joined(x[key]) for x in history])
        wanted = wanted_of(CASES[key], schedule, mix_every, given)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-11, err_msg=key)


INVALID = [(case, kind) for case in CASES for kind in REFUSED[case]]


@pytest.mark.parametrize(("name", "kind"), INVALID)
def test_refusals_name_the_method_and_the_schedule(name, kind):
    case = CASES[name]
    with pytest.raises(ValueError, match=REFUSED[name][kind]) as error:
        build(case, *KINDS[kind])
    family = case.method
    if case.oracle in ("dpsgd", "dmsgd", "accum_adam"):
        family = "decentralized"
    assert str(error.value).startswith(family.removesuffix("_sgd").removesuffix("_adam"))


@pytest.mark.parametrize("name", ["one_peer_exp", "hypercube", "static_exp"])
def test_exact_diffusion_refuses_what_diverges(name):
    """The oracle diverges there, and with mixing in every step does not."""
    schedule, inner = topology.make(name, N), optax.sgd(0.1)
    optim.contrib.exact_diffusion(inner, schedule)
    with refuses("exact_diffusion", name, "mix_every=3"):
        optim.contrib.exact_diffusion(inner, schedule, mix_every=3)
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
        optim.contrib.d2(inner, topology.make("bidirectional_ring", 8))
    with refuses("d2", "custom", 4, "-0.600000"):
        eye = np.eye(4)
        ring = 0.2 * eye + 0.4 * (np.roll(eye, 1, 0) + np.roll(eye, -1, 0))
        optim.contrib.d2(inner, topology.Schedule.from_matrices([ring]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.contrib.d2(inner, topology.make("bidirectional_ring", 7))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("d2", {"combine": "awc"}, "d2 'atc' 'awc'"),
        ("noloco", {"combine": "awc"}, "noloco 'atc' 'awc'"),
        ("sparseloco", {}, "sparseloco bidirectional_ring complete"),
        ("sparseloco", {"numbers": {"decay": 2}}, "sparseloco.decay 2"),
        ("sparseloco", {"numbers": {"density": 0}}, "density 0"),
        ("push_sum", {"codec": codecs.BFloat16()}, "push_sum codec"),
        ("choco", {"numbers": {"compressor": "zip"}}, "choco.compressor top_k 'zip'"),
        ("choco", {"numbers": {"fraction": 0}}, "choco.fraction 0"),
        ("choco", {"numbers": {"gamma": 2}}, "choco.gamma 2"),
        ("decentralized_sgd", {"numbers": {"gamma": -1}}, "gamma -1"),
        ("decentralized_sgd", {"numbers": {"mix_rounds": 0}}, "mix_rounds 0"),
        ("quasi_global_sgd", {"optimizer": {"momentum": 1}}, "momentum 1"),
        ("diloco", {"numbers": {"learning_rate": -1}}, "outer.learning_rate -1"),
        ("diloco", {"numbers": {"momentum": 1}}, "outer.momentum 1"),
        ("swarm", {"codec": codecs.Int8()}, "swarm lattice8 int8"),
        ("noloco", {"codec": codecs.Lattice(8)}, "noloco lattice int8 swarm"),
        ("diloco", {}, "diloco bidirectional_ring complete"),
        ("swarm", {}, "swarm bidirectional_ring random_matching"),
    ],
)
def test_impossible_pairings(method, changes, message):
    case = Case(method, method)
    with refuses(*message.split()):
        averages = case.method in ("diloco", "sparseloco")
        averages &= bool(changes)
        build(case, "complete" if averages else "bidirectional_ring", **changes)


@pytest.mark.parametrize(("combine", "times"), [("awc", 5), ("atc", 2)])
def test_several_rounds_per_step_are_the_product_of_their_matrices(combine, times):
    """RelaySGD's SGP has two; the next step goes on where the last one ended."""
    schedule, n = topology.make("one_peer_exp", 8), 8
    targets = np.random.default_rng(0).normal(size=(n, 3))
    tx = optim.decentralized(optax.sgd(0.1), schedule, combine, mix_rounds=times)
    history = harness.trajectory(
        tx, lambda x, target: x - target, schedule, jnp.zeros((n, 3)), [targets] * 7
    )

    def matrix(t):
        matrices = (schedule.matrix((times * t + k) % 3) for k in range(times))
        return functools.reduce(lambda product, W: W @ product, matrices)

    start = np.zeros((n, 3))
    right = oracles.run(
        oracles.dpsgd, matrix, lambda x, t: x - targets, start, 7, 0.1, combine=combine
    )
    np.testing.assert_allclose([x for x, _ in history], right, atol=1e-12)
    sent = harness.bytes_sent(
        "decentralized_sgd", jnp.zeros(3, jnp.float32), schedule, numbers={"mix_rounds": times}
    )
    assert sent == times * 12
    for wrong in (-1, 3):
        step = harness.on_stack(harness.step_of(tx, lambda x: x, wrong), "vmap", n)
        with pytest.raises(ValueError):
            step(jnp.zeros((n, 3)), jax.vmap(tx.init)(jnp.zeros((n, 3))))
    repeats = topology.make("periodic_average(ring, every=4)", n)
    with refuses("mix_rounds", times, error=ValueError):
        optim.decentralized(optax.sgd(0.1), repeats, mix_rounds=times)


def test_gossiped_momentum_needs_momentum():
    tx = optim.gossiped_momentum(optax.sgd(0.1), topology.make("ring", N))
    with refuses("gossiped_momentum", "momentum="):
        tx.init(jnp.zeros(2))
