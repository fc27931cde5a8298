"""`gossip.mix` against dense matrices, wherever the replicas live."""

import functools
import itertools
from types import SimpleNamespace

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixing import metropolis
from refusals import refuses

from decent_jax import gossip, topology
from decent_jax.gossip import permute
from decent_jax.topology import Schedule


def on_stack(fn, form, n, devices=1, check_vma=None):
    """``fn(axis_name, *replica's own trees)`` as a jitted function of stacked trees."""
    fn = functools.partial(fn, harness.axis_of(form))
    return harness.on_stack(fn, form, n, devices, check_vma)


def birkhoff(n, seed, count=3):
    """A random doubly stochastic matrix, whose permutations respect no block of devices."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(count + 1))
    matrix = weights[-1] * np.eye(n)
    for weight in weights[:-1]:
        matrix[np.arange(n), rng.permutation(n)] += weight
    return matrix


# A schedule of many rounds, or of many messages, is compiled for a small n only.
COSTLY = ("star", "erdos_renyi", "random_regular", "grid", "torus")
ROUNDS = {"random_matching": {"rounds": 2}, "equi_dynamic": {"rounds": 2}}
ROUNDS["periodic_average"] = {"every": 3}
NODES = {
    "alternating_exp_ring": (2, 3, 4),
    "hierarchical": (2, 3, 4),
    "hierarchical(ring, one_peer_exp)": (4,),
    "hierarchical(complete, bidirectional_ring)": (4,),
}


# To the guard, which acts on sends and groups, these are like others that it is tried on.
LIKE_OTHERS = ("static_exp", "torus", *ROUNDS, "random_regular", "erdos_renyi")


def schedules_of(n):
    """Every named schedule that exists for n, and matrices of one's own."""
    found = {}
    for name in dict.fromkeys((*topology.NAMES, *NODES)):
        if n > 8 and name in COSTLY:
            continue
        options = ROUNDS[name] if name in ROUNDS and n > 3 else {}
        for local in NODES.get(name, (1,)):
            try:
                found[name, local] = topology.make(name, n, replicas_per_node=local, **options)
            except ValueError:
                continue
    if n > 2:
        matrices = [birkhoff(n, seed=n), metropolis([(0, leaf) for leaf in range(1, n)], n)]
        found["matrices", 1] = Schedule.from_matrices(matrices)
    return found


def fitting(schedule, n, devices):
    """Whether groups fill, or divide, the replicas of a device (else mix refuses)."""
    block = n // devices
    sizes = {one.group_size for one in schedule.rounds}
    return all(block % g == 0 or g % block == 0 for g in sizes)


def tree_for(n, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "kernel": rng.normal(size=(n, 2, 3)).astype(dtype),
        "scale": rng.normal(size=(n,)).astype(dtype),
        "odd": rng.normal(size=(n, 5, 7)).astype(dtype),
    }


def rounds_of(n, devices):
    """{(name, replicas_per_node, r): schedule} of all that fit, those of equal messages once."""
    found = {}
    for key, schedule in schedules_of(n).items():
        for r, one in enumerate(schedule.rounds if fitting(schedule, n, devices) else ()):
            sends = [(send.sources.tobytes(), send.weights.tobytes()) for send in one.sends]
            message = one.group_size, one.self_weights.tobytes(), *sends
            found.setdefault(message, ((*key, r), schedule))
    return dict(found.values())


# (form, n, devices): n in and out of powers of two, blocks that permutations do not respect, a
# node inside a device, over two and over all.
FORMS = [
    *(("vmap", n, 1) for n in (1, 3, 4)),
    *(("devices", n, n) for n in (2, 5)),
    *(("block", 2, 1), ("block", 6, 3), ("block", 8, 4), ("block", 15, 5)),
]


@pytest.mark.parametrize(("form", "n", "devices"), FORMS)
def test_mix_is_the_matrix(form, n, devices, x64):
    """All schedules and rounds of a size in one executable, and with replicas that are not finite.

    Guarded, a replica's tree holds a pattern of bad replicas per row.
    """
    schedules = rounds_of(n, devices)
    assert len(schedules) > (5 if n > 2 else 0)
    # The guard acts on messages and groups, which are alike in what is left out.
    guarded = [
        key
        for key, schedule in schedules.items()
        if n <= 8 and key[0] not in LIKE_OTHERS and (key[-1] == 0 or schedule.partial_groups)
    ]
    patterns = all_patterns(n) if n <= 5 else some_patterns(n)
    bad_rows = poisoned(n, patterns, (np.nan, np.inf, -np.inf)[n % 3])

    def mix_bad(axis_name, key, x):
        ok = jnp.isfinite(x).all()
        tree = {"a": x[:1], "b": x[1:]}
        mixed = gossip.mix(tree, schedules[key], key[-1], axis_name, finite=ok)
        return jnp.concatenate([mixed["a"], mixed["b"]])

    def every_round(axis_name, tree, rows):
        plain = {key: gossip.mix(tree, one, key[-1], axis_name) for key, one in schedules.items()}
        bad = {k: jax.vmap(functools.partial(mix_bad, axis_name, k))(rows) for k in guarded}
        return plain, bad

    tree = tree_for(n)
    grouped = any(schedule.partial_groups for schedule in schedules.values())
    check_vma = False if grouped else None
    plain, bad = on_stack(every_round, form, n, devices, check_vma)(tree, bad_rows)
    for key, schedule in schedules.items():
        for leaf, x in tree.items():
            y = np.asarray(plain[key][leaf])
            wanted = np.einsum("ij,j...->i...", schedule.matrix(key[-1]), x)
            assert y.dtype == np.float64
            np.testing.assert_allclose(y, wanted, atol=1e-14, err_msg=f"{key} {leaf}")
            np.testing.assert_allclose(y.mean(0), x.mean(0), atol=1e-14)
    for key in guarded:
        one, y = schedules[key].rounds[key[-1]], np.asarray(bad[key])
        for p, pattern in enumerate(patterns):
            wanted = guarded_round(one, bad_rows[:, p], ~pattern)
            message = f"{key} bad {pattern}"
            np.testing.assert_allclose(y[:, p], wanted, atol=1e-14, err_msg=message)
            if not pattern.any():
                np.testing.assert_allclose(y[:, p], one.matrix @ bad_rows[:, p], atol=1e-14)
            if not pattern.all() and key[0] == "complete":
                assert np.isfinite(y[:, p]).all()
        assert np.isnan(y).any()  # all bad stays NaN


def test_groups_of_which_members_hear_different_groups(x64):
    """A round of one's own: the mean of a group, then whole models as it says."""
    n, g = 8, 2
    sources = np.array([2, 5, -1, -1, 0, 1, 6, 3])
    weights = np.where(sources >= 0, 0.25, 0.0)
    exchange = np.diag(1 - weights)
    receivers = np.flatnonzero(sources >= 0)
    exchange[receivers, sources[receivers]] += 0.25
    matrix = exchange @ np.kron(np.eye(n // g), np.full((g, g), 1 / g))
    one = topology.Round(g, 1 - weights, (topology.Send(sources, weights),), matrix)
    assert one.between_groups is None and one.models_sent_by_nodes() == 2
    schedule = Schedule("of one's own", n, (one,))
    x = np.random.default_rng(0).normal(size=(n, 3))
    for form, devices in (("vmap", 1), ("devices", 8), ("block", 4)):
        fn = on_stack(lambda axis, x: gossip.mix(x, schedule, 0, axis), form, n, devices, False)
        np.testing.assert_allclose(fn(x), matrix @ x, atol=1e-14)


# --- replicas that are not finite -----------------------------------------------------------------


def guarded(matrix, x, ok):
    """DESIGN 6 in NumPy, one replica at a time. x: (n, ...), ok: (n,) bool. Returns both, after."""
    out = np.full_like(x, np.nan)
    for i in range(len(x)):
        heard = [j for j in range(len(x)) if j != i and ok[j] and matrix[i, j] > 0]
        total = sum(matrix[i, j] for j in heard)
        if ok[i]:  # what was lost goes to the own copy
            out[i] = sum((matrix[i, j] * x[j] for j in heard), (1 - total) * x[i])
        elif heard:
            out[i] = sum(matrix[i, j] * x[j] for j in heard) / total
    return out, np.isfinite(out.reshape(len(x), -1)).all(1)


def guarded_round(one, x, ok):
    """Groups first, then the exchange, each by the rule; groups that send count as one replica."""
    n, g = len(x), one.group_size
    if g > 1 and one.sends:
        groups = ok.reshape(-1, g)
        clean = np.where(ok[:, None], x, 0).reshape(-1, g, x.shape[1])
        means = clean.sum(1) / np.maximum(groups.sum(1), 1)[:, None]
        exchange = one.matrix[::g].reshape(n // g, n // g, g).sum(2)
        return np.repeat(guarded(exchange, means, groups.any(1))[0], g, axis=0)
    if g > 1:
        x, ok = guarded(np.kron(np.eye(n // g), np.full((g, g), 1 / g)), x, ok)
    exchange = np.diag(one.self_weights).astype(float)
    for send in one.sends:
        for i in np.flatnonzero(send.sources >= 0):
            exchange[i, send.sources[i]] += send.weights[i]
    return guarded(exchange, x, ok)[0]


def poisoned(n, patterns, poison=np.nan, seed=3):
    """(n, patterns, 3) values where replica i of pattern p is bad if ``patterns[p, i]``."""
    x = np.random.default_rng(seed).normal(size=(n, len(patterns), 3))
    for p, i in zip(*np.nonzero(patterns), strict=True):
        x[i, p, (p + i) % 3] = poison  # one bad number makes the whole replica bad
    return x


def all_patterns(n):
    return np.array(list(itertools.product([False, True], repeat=n)))


def some_patterns(n):
    """None bad, all bad, each one alone, each but one, and a few at random."""
    eye = np.eye(n, dtype=bool)
    rng = np.random.default_rng(n)
    return np.concatenate(
        [np.zeros((1, n), bool), np.ones((1, n), bool), eye, ~eye, rng.random((6, n)) < 0.5]
    )


# --- refusals -------------------------------------------------------------------------------------


def trace(form, n, devices, schedule, round=0, *, check_vma=None, axis_name=None, x=None):
    fn = on_stack(
        lambda axis, x: gossip.mix(x, schedule, round, axis if axis_name is None else axis_name),
        form,
        n,
        devices,
        check_vma,
    )
    return jax.eval_shape(fn, jnp.zeros((n, 2)) if x is None else x)


def test_wrong_number_of_replicas():
    ring = topology.make("ring", 8)
    for form in ("vmap", "devices"):
        with refuses("'ring'", 8, "'replica'", 4):
            trace(form, 4, 4, ring)
    with refuses("'ring'", 8, "('replica', 'block')", 12):
        trace("block", 12, 4, ring)
    with refuses("'ring'", 8, "'replica'", 4):
        trace("block", 8, 4, ring, axis_name="replica")  # forgot the block
    assert trace("block", 8, 4, ring).shape == (8, 2)


@pytest.mark.parametrize(
    ("form", "n", "devices", "name", "given", "named"),
    [
        *(("vmap", 8, 1, "one_peer_exp", {"round": r}, ("one_peer_exp", 2, r)) for r in (3, -1)),
        ("block", 8, 4, "ring", {"axis_name": ("block", "replica")}, (("block", "replica"),)),
        ("block", 8, 4, "ring", {"axis_name": ("block", "block")}, (("block", "block"),)),
        ("block", 8, 4, "ring", {"check_vma": True}, ("'block'", "check_vma=False")),
        ("devices", 8, 8, "alternating_exp_ring", {"check_vma": True}, (4, "check_vma=False")),
        # Nodes that blocks cut, also where a round is a mean alone.
        ("block", 6, 3, "hierarchical", {}, ("groups of 3", "2 replicas")),
        ("block", 6, 3, "alternating_exp_ring", {"round": 1}, ("groups of 3", "2 replicas")),
    ],
)
def test_what_mix_refuses(form, n, devices, name, given, named):
    schedule = topology.make(name, n, replicas_per_node=n // 2)
    with refuses(*named):
        trace(form, n, devices, schedule, **given)


def test_where_groups_and_blocks_may_be():
    schedule = topology.make("alternating_exp_ring", 8, replicas_per_node=4)
    assert trace("devices", 8, 8, schedule, check_vma=False).shape == (8, 2)
    assert trace("devices", 8, 8, topology.make("complete", 8), check_vma=True).shape == (8, 2)
    schedule = topology.make("alternating_exp_ring", 6, replicas_per_node=3)
    assert trace("block", 6, 2, schedule).shape == (6, 2)


@pytest.mark.parametrize("devices", [3, 2])  # blocks of two, and of three: an odd row is added too
def test_mean_in_a_block(devices):
    x = tree_for(6, np.float32) | {"steps": np.full(6, 4, np.int32)}
    got = on_stack(lambda axis, x: gossip.mean(x, axis), "block", 6, devices)(x)
    for key, leaf in x.items():
        wanted = np.broadcast_to(leaf.mean(0), leaf.shape)
        np.testing.assert_allclose(got[key], wanted, atol=1e-6)
        assert got[key].dtype == leaf.dtype


# --- narrow dtypes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bidirectional_ring", "star", "base_k(max_degree=2)"])
def test_replicas_that_agree_stay_where_they_are_in_bfloat16(name):
    """Weights rounded to bfloat16 do not sum to 1: parameters grew by 0.2% per round."""
    schedule = topology.make(name, 7)
    x = jnp.broadcast_to(jnp.linspace(1, 2, 128, dtype=jnp.bfloat16), (7, 128))
    matrix = jnp.asarray(schedule.matrix(0), jnp.float32)
    for round in (0, gossip.Simulated(0, matrix)):
        mix = functools.partial(gossip.mix, schedule=schedule, round=round)
        y = jax.vmap(mix, axis_name="replica")(x)
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(y, x)


def test_messages_of_a_simulated_round_have_the_weights_of_the_receivers():
    """On a matrix that is not symmetric; replica i receives from i - 1."""
    schedule = topology.make("one_peer_exp", 4)
    matrix = np.random.default_rng(0).uniform(size=(4, 4))

    def weight(x):
        ((_, given),) = gossip.receive(x, schedule, gossip.Simulated(0, jnp.asarray(matrix)))
        return given

    given = jax.vmap(weight, axis_name="replica")(jnp.zeros((4, 1)))
    np.testing.assert_allclose(given, [matrix[i, i - 1] for i in range(4)], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "form", "guarded"),
    [
        *((jnp.bfloat16, "vmap", False), (jnp.bfloat16, "devices", True)),
        *((jnp.float16, "vmap", True), (jnp.float16, "devices", False)),
    ],
)
def test_narrow_numbers_are_added_in_float32_and_rounded_once(dtype, form, guarded):
    """Against float64: means of all and of groups, groups that send on, and the mean itself."""
    n = 8
    x = jnp.asarray(1 + np.random.default_rng(0).normal(size=(n, 500)), dtype)
    names = ("complete", "hierarchical", "alternating_exp_ring", "one_peer_exp", "static_exp")
    schedules = [topology.make(name, n, replicas_per_node=4) for name in names]
    wanted = [s.matrix(0) @ np.float64(x) for s in schedules]
    wanted.append(np.broadcast_to(np.float64(x).mean(0), x.shape))

    def all_of_them(x):
        finite = jnp.isfinite(x).all() if guarded else None
        mixed = [gossip.mix(x, schedule, 0, finite=finite) for schedule in schedules]
        return [*mixed, gossip.mean(x)]

    run = harness.on_stack(all_of_them, form, n, n, check_vma=False)
    for got, right in zip(run(x), wanted, strict=True):
        assert got.dtype == dtype
        ulp = float(jnp.finfo(dtype).eps) * np.maximum(np.abs(right), 2.0**-4)
        assert (np.abs(np.float64(got) - right) <= 0.51 * ulp).all()
    large = run(jnp.full((n, 4), 30000, dtype))
    for got in large:
        np.testing.assert_array_equal(np.float32(got), np.float32(jnp.asarray(30000, dtype)))


# --- Permutes across TPU slices -------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8])
def test_permutes_are_closed_on_tpus_and_nowhere_else(n, monkeypatch):
    """Each device sends and receives once; one that is idle sends to itself."""
    rng = np.random.default_rng(n)
    for receivers in range(1, n + 1):
        device_map = np.full(n, -1)
        chosen = rng.permutation(n)[:receivers]
        device_map[chosen] = rng.permutation(n)[:receivers]
        wanted = {(source, device) for device, source in enumerate(device_map) if source >= 0}
        for kind, closed in (("TPU v6 lite", True), ("TPU7x", True), ("NVIDIA H100", False)):
            mesh = SimpleNamespace(abstract_device=SimpleNamespace(device_kind=kind))
            monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda mesh=mesh: mesh)
            pairs = permute.pairs_of(device_map.tolist())
            assert wanted <= set(pairs) and len(pairs) == (n if closed else receivers)
            sources, targets = map(sorted, zip(*pairs, strict=True))
            if closed:
                assert sources == targets == list(range(n))
            idle = set(range(n)) - set(np.ravel(list(wanted)).tolist())
            assert all(pair in pairs for pair in zip(idle, idle, strict=True)) or not closed


def test_on_tpus_groups_send_all_their_arrays_at_once(monkeypatch):
    """The numbers are the same."""
    schedule = topology.make("alternating_exp_ring", 8, replicas_per_node=4)
    (between, *_) = [k for k, rnd in enumerate(schedule.rounds) if rnd.between_groups is not None]
    mesh = jax.make_mesh((8,), ("replica",), (jax.sharding.AxisType.Auto,))
    rows = jax.random.normal(jax.random.key(0), (3, 8, 2 * permute.SMALL // 4))

    def run(there):
        monkeypatch.setattr(permute, "on_tpus", lambda: there)
        mixed = jax.jit(lambda tree: gossip.mix_on(mesh, tree, schedule, between))
        return mixed(list(rows)), str(jax.make_jaxpr(mixed)(list(rows))).count("reduce_scatter[")

    (wanted, each), (got, once) = run(False), run(True)
    assert (each, once) == (3, 1)
    np.testing.assert_allclose(np.stack(got), np.stack(wanted), rtol=1e-6, atol=1e-6)
