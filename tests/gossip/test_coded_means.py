"""Means of coded messages: the formula, the same bits everywhere, no bias, and the bytes sent."""

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from refusals import refuses

from decent_jax import gossip, topology
from decent_jax.gossip.codecs import BFloat16, Int4, Int8
from decent_jax.gossip.groups import ROW, coded_means
from decent_jax.gossip.permute import ReplicaAxis

NAMES, KEY = ("replica", "row"), jax.random.key(3)
N = 8
BITS = {"u8": 8, "s8": 8, "u16": 16, "f32": 32}
BYTES = {Int8(): 1 + 4 / ROW, Int4(): 0.5 + 4 / ROW, BFloat16(): 2}
every = pytest.mark.parametrize("codec", BYTES, ids=repr)


def stacked(shapes=((100, 7), (5000,)), n=N, seed=0):
    rng = np.random.default_rng(seed)
    return {f"x{k}": rng.normal(size=(n, *s)).astype(np.float32) for k, s in enumerate(shapes)}


def on(devices, fn):
    """A function of one replica, on that many devices with N / devices replicas on each."""
    mesh = jax.make_mesh((devices,), ("replica",), axis_types=(AxisType.Auto,))
    return jax.jit(gossip.on_mesh(fn, mesh, NAMES))


def means_over(g, codec, tree, finite=None):
    axis = ReplicaAxis.over(NAMES)
    leaves, put_back = gossip.mixable(tree)
    flag = None if finite is None else axis.lift(finite)
    mean, own = coded_means(leaves, g, axis, codec, KEY, flag)
    return put_back(mean), put_back(own)


def by_numpy(codec, tree, g):
    """Both results from the definition, with the codec's NumPy form and the noise of each owner."""
    flat = np.concatenate([x.reshape(N, -1) for x in tree.values()], axis=1)
    size = flat.shape[1]
    rows = -(-size // (g * ROW))
    chunks = np.pad(flat, ((0, 0), (0, g * rows * ROW - size))).reshape(N, g, rows, ROW)

    def coded(nth, replica, x):
        key = jax.random.fold_in(jax.random.fold_in(KEY, nth), replica)
        noise = codec.noise(key, x.shape)
        return codec.decode(codec.encode(x, None if noise is None else np.asarray(noise)), x)

    own = np.stack([coded(0, i, x.reshape(-1, ROW)).reshape(x.shape) for i, x in enumerate(chunks)])
    mean = np.zeros_like(chunks)
    for i in range(N):
        group = slice(i // g * g, i // g * g + g)
        for k in range(g):
            total = own[group, k].sum(axis=0, dtype=np.float64).astype(np.float32)
            mean[i, k] = coded(1, group.start + k, total / np.float32(g))
    return [x.reshape(N, -1)[:, :size] for x in (mean, own)]


# Groups on one device, on several of each, and over all; a format's codes are the same everywhere.
PLACEMENTS = [(Int8(), 8, (1, 4, 8)), (Int4(), 8, (4,)), (BFloat16(), 8, (8,)), (Int4(), 4, (2, 8))]


@pytest.mark.parametrize(("codec", "g", "placements"), PLACEMENTS, ids=repr)
def test_means_are_those_of_the_definition_on_every_placement(codec, g, placements):
    tree = stacked()
    wanted = by_numpy(codec, tree, g)
    for devices in placements:
        got = on(devices, lambda x: means_over(g, codec, x))(tree)
        for tree_got, want in zip(got, wanted, strict=True):
            flat = np.concatenate([np.asarray(x).reshape(N, -1) for x in tree_got.values()], axis=1)
            # A sum in another order may round a mean to the next number of the format.
            assert (flat == want).mean() > 0.999
            np.testing.assert_allclose(flat, want, rtol=0, atol=0.7)
        mean = np.asarray(got[0]["x1"]).reshape(N // g, g, -1)
        assert (mean == mean[:, :1]).all(), "members of a group hold other bits"


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=repr)
def test_means_are_unbiased_with_the_stated_variance(codec):
    n, draws = 4, 500
    x = jnp.asarray(np.random.default_rng(0).normal(size=(n, 40)), jnp.float32)

    def one(key):
        def mean(x):
            return gossip.mix(x, topology.make("complete", n), 0, codec=codec, key=key)

        return jax.vmap(mean, axis_name="replica")(x)[0]

    got = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(KEY, draws)), np.float64)
    largest = np.abs(x).max(initial=0) * (1 + 2**-7)
    step = largest / 7 if codec == Int4() else largest / 127
    variance = step**2 / 4 / n + step**2 / 4
    assert (got.var(axis=0) <= 1.1 * variance).all() and got.var(axis=0).max() > 0
    error = np.abs(got.mean(axis=0) - np.asarray(x, np.float64).mean(axis=0))
    assert (error < 5 * np.sqrt(variance / draws)).all()


@every
def test_bytes_are_two_coded_models_less_one_nth(codec, users_hlo):
    tree = {"w": jax.ShapeDtypeStruct((N, 4 * N, ROW), jnp.float32)}
    schedule = topology.make("complete", N)
    mean = on(N, lambda x: gossip.mix(x, schedule, 0, NAMES, codec=codec, key=KEY))
    text = mean.lower(tree).compile().as_text()
    sent = 0.0
    for line in text.splitlines():
        if found := re.search(r"= (.*?) (collective-permute|all-gather)(-start)?\(", line):
            arrays = re.findall(r"\b([a-z]+[0-9]+)\[([0-9,]*)\]", found[1])
            size = sum(BITS[kind] / 8 * prod(map(int, s.split(","))) for kind, s in arrays)
            sent += size if found[2] == "collective-permute" else size * (N - 1) / N
    assert sent == 2 * (N - 1) / N * 4 * N * ROW * BYTES[codec]


def test_replicas_that_are_not_finite_never_enter_a_sum():
    tree = stacked()
    tree["x0"][3, 5] = np.nan
    tree["x0"][6] = np.inf
    fine = np.delete(np.arange(N), [3, 6])
    finite = np.isin(np.arange(N), fine)
    run = on(4, lambda x, ok: means_over(8, Int8(), x, ok))
    mean, _ = run(tree, finite)
    wanted = tree["x1"][fine].mean(0)
    np.testing.assert_allclose(mean["x1"][3], wanted, atol=0.06)
    np.testing.assert_allclose(mean["x1"][0], (6 * wanted + 2 * tree["x1"][0]) / 8, atol=0.06)
    assert np.isfinite(mean["x0"]).all()
    lost, _ = run(tree, finite & False)
    assert np.isnan(lost["x1"]).all()


def test_groups_that_send_on_are_refused():
    schedule = topology.make("alternating_exp_ring", 8, replicas_per_node=2)
    with refuses(schedule.name):
        gossip.check_coded(schedule)
    gossip.check_coded(topology.make("complete", 8))
