"""Gossip over gloo: pairs as sums, and the step in three parts; here in one process of 8 devices.

That the same runs in processes of their own is in test_multiprocess.
"""

import functools
import math
import threading

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from decent_jax import gossip, replicas, topology
from decent_jax.cpu import gloo
from decent_jax.train import algorithm, xla
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.config import parse

pytestmark = pytest.mark.usefixtures("compile_once")

DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8, jnp.int32, bool)
INVOLUTIONS = ([1, 0, 3, 2, 5, 4, 7, 6], [4, 5, 6, 7, 0, 1, 2, 3], [7, 6, 5, 4, 3, 2, 1, 0])


@pytest.fixture
def as_if_over_gloo():
    with harness.as_if(True):
        yield


def drawn(dtype, shape, rng):
    """Every bit pattern may come, but no NaN of bfloat16, whose bits even ppermute changes."""
    if dtype is bool:
        return jnp.asarray(rng.random(shape) < 0.5)
    bits = rng.bytes(int(np.prod(shape)) * jnp.dtype(dtype).itemsize)
    if dtype is jnp.bfloat16:
        words = np.frombuffer(bits, np.uint16)
        bits = np.where(words & 0x7F80 == 0x7F80, words & 0xFF80, words).tobytes()
    return jnp.asarray(np.frombuffer(bits, jnp.dtype(dtype)).reshape(shape))


def bits_of(x):
    return np.asarray(x).view(np.uint8)


def test_a_swap_is_a_permutation_bit_for_bit():
    rng = np.random.default_rng(0)
    x = {f"{np.dtype(d)}{s}": drawn(d, s, rng) for d in DTYPES for s in [(8,), (8, 3, 5)]}

    def swapped(x):
        pairs = [[(source, device) for device, source in enumerate(p)] for p in INVOLUTIONS]
        return [jax.tree.map(lambda x, p=p: gloo.swap(x, p, "replica"), x) for p in pairs]

    run = harness.on_stack(swapped, "devices", 8, 8, check_vma=False)
    for partners, got in zip(INVOLUTIONS, run(x), strict=True):
        for name, given in x.items():
            assert (got[name].dtype, got[name].shape) == (given.dtype, given.shape)
            wanted = bits_of(np.asarray(given)[partners])
            np.testing.assert_array_equal(bits_of(got[name]), wanted, err_msg=name)


@pytest.mark.parametrize(
    ("name", "sums"),
    [("hypercube", 3), ("one_peer_exp", 1), ("ring", 2), ("bidirectional_ring", 0)],
)
def test_only_rounds_of_pairs_are_sums(name, sums, as_if_over_gloo):
    schedule, kinds = topology.make(name, 8), []
    x = np.random.default_rng(0).normal(size=(8, 5, 3)).astype(np.float32)
    for r in range(schedule.period):
        mix = functools.partial(gossip.mix, schedule=schedule, round=r)
        run = harness.on_stack(mix, "devices", 8, 8, check_vma=False)
        compiled = run.lower(x).compile()
        kinds += {kind for kind, _, _ in collectives(compiled.as_text())}
        mixed = np.einsum("ij,j...->i...", schedule.matrix(r), x.astype(np.float64))
        np.testing.assert_allclose(compiled(x), mixed, rtol=1e-6, atol=1e-6)
    assert kinds.count("all-reduce") == sums
    assert kinds.count("collective-permute") == schedule.period - sums


def test_shards_of_a_replica_are_permuted_as_they_are(as_if_over_gloo):
    """Nothing is packed or swapped where an array is only whole on several devices."""
    mesh = jax.make_mesh((4, 2), ("replica", "fsdp"), (AxisType.Auto,) * 2)
    schedule = topology.make("hypercube", 4)
    sharding = NamedSharding(mesh, P("replica", None, "fsdp"))
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 4)).astype(np.float32)
    run = jax.shard_map(
        lambda tree: jax.tree.map(lambda x: x[None], gossip.mix([x[0] for x in tree], schedule, 1)),
        mesh=mesh,
        in_specs=P("replica"),
        out_specs=P("replica"),
        axis_names={"replica"},
        check_vma=False,
    )
    tree = [jax.device_put(part, sharding) for part in x]
    compiled = jax.jit(run).lower(tree).compile()
    found = [(kind, sizes) for kind, sizes, _ in collectives(compiled.as_text())]
    assert found == [("collective-permute", [12])] * 2
    for part, mixed in zip(x, compiled(tree), strict=True):
        wanted = np.einsum("ij,j...->i...", schedule.matrix(1), part)
        np.testing.assert_allclose(mixed, wanted, rtol=1e-6)


# --- the step in three parts ---------------------------------------------------------------------

# Rounds of two kinds; several replicas a device, coded messages and decay in the gradient; nodes,
# mixing by half, and a state of the model that is mixed too; moments that are mixed.
CASES = {
    "plain": {},
    "l2": {
        "schedule": "bidirectional_ring",
        "codec": "int8",
        "mesh": {"devices": 2},
        "optimizer": {"decoupled": False},
    },
    "sgd": {
        "schedule": "hierarchical",
        "replicas_per_node": 2,
        "algorithm": "decentralized_sgd",
        "gamma": 0.5,
    },
    "moments": {
        "algorithm": "gossiped_momentum",
        "combine": "awc",
        "optimizer": {"name": "adam"},
    },
}


class Layers:
    """A task of two layers, see `decent_jax.tasks.Task`; a batch is (B, 32) float32.

    Dropout reads the number of the step and of the replica.
    """

    def __init__(self, mixes_state):
        self.mixes_state = mixes_state

    def init(self, key):
        shapes = {"one": (32, 64), "bias": (64,), "two": (64, 8)}
        drawn = {name: jnp.cos(jnp.arange(math.prod(shape))) for name, shape in shapes.items()}
        params = {name: x.reshape(shapes[name]) / 8 for name, x in drawn.items()}
        return params, {"mean": jnp.zeros(())}

    def load_params(self):
        return None

    def decay_mask(self, params):
        return {"one": True, "bias": False, "two": True}

    def loss(self, params, model_state, batch, key):
        kept = jnp.where(jax.random.bernoulli(key, 0.9, batch.shape), batch, 0)
        out = jnp.tanh(kept @ params["one"] + params["bias"][None]) @ params["two"]
        return jnp.square(out - 1).mean(), {"mean": 0.9 * model_state["mean"] + 0.1 * out.mean()}


class Trainer:
    """Steps of 4 replicas in one program and, as if gloo sent their messages, in parts."""

    def __init__(self, **changes):
        self.config = tiny.config("no data", **{"mesh": {"devices": 4}} | changes)
        self.placement = replicas.place(4, jax.devices()[: self.config.mesh.devices])
        self.schedule = config_lib.make_schedule(self.config)
        self.task = Layers(mixes_state=self.config.schedule == "hierarchical")
        of_task = self.task.decay_mask, self.placement.axis_name
        self.tx = algorithm.transformation(parse(self.config), self.schedule, self.rate, *of_task)
        with harness.as_if(False):
            self.whole = self.make_step()
        with harness.as_if(True):
            self.parts = self.make_step()

    def rate(self, t):
        return 0.01

    def make_step(self):
        made = self.config, self.task, self.tx, self.rate, self.schedule, self.placement
        return step_lib.make_step(*made)


def compiled(made):
    """Adds to a `Trainer`: a state, six batches, and the programs of each by their rounds."""
    state = made.state = step_lib.init_state(made.config, made.task, made.tx, made.placement)
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(4, 2, 32)).astype(np.float32) for _ in range(6)]
    made.batches = [made.placement.put(x) for x in rows]
    made.bytes = sum(x.nbytes for x in jax.tree.leaves(state.params)) // 4  # of a replica

    def program(step, r):
        return step.lower(state, made.batches[0], np.int32(0), round=r).compile()

    made.rounds = [*range(made.schedule.period), *([None] if made.task.mixes_state else [])]
    with harness.as_if(False):
        made.whole_programs = {r: program(made.whole, r) for r in made.rounds}
    with harness.as_if(True):
        made.programs = {r: program(made.parts, r) for r in made.rounds}
    return made


@pytest.fixture(scope="module")
def case():
    """``case(name)``: one of CASES, compiled once."""
    return functools.cache(lambda name: compiled(Trainer(**CASES[name])))


def copy(tree):
    """Of what a program may donate."""
    return jax.tree.map(jnp.copy, tree)


def test_pairs_of_some_devices_are_not_swapped():
    """Each device has to take part in a sum over pairs."""
    assert gloo.swap_is_faster([(0, 1), (1, 0)], 2)
    assert not gloo.swap_is_faster([(0, 1), (1, 0)], 4)


@pytest.mark.parametrize("name", CASES)
def test_three_parts_make_the_step_of_one(name, case):
    """Each of six steps, without communication too, bit for bit but for the order of an addition;
    metrics, moments and moving average too. Both begin with the same state: rounding to int8
    enlarges the smallest gap."""
    made = case(name)
    assert callable(made.whole) and not callable(made.parts)
    state = copy(made.state)
    for t, batch in enumerate(made.batches):
        r = made.rounds[t % len(made.rounds)]
        other = jax.device_get(made.programs[r](copy(state), batch, np.int32(t)))
        state, metrics = made.whole_programs[r](state, batch, np.int32(t))
        one = jax.device_get((state, metrics))
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6)


def test_a_timed_step_is_the_same_step(case):
    """Its halves take time."""
    made = case("plain")
    args = made.batches[0], np.int32(0)
    (state, metrics), (compute_s, message_s) = made.programs[0].timed(copy(made.state), *args)
    again = made.programs[0](copy(made.state), *args)
    for a, b in zip(*map(jax.tree.leaves, ((state, metrics), again)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert min(compute_s, message_s) > 0


def test_threads_of_the_devices_end_with_their_step(case):
    made = case("plain")
    jax.block_until_ready(made.programs[0](copy(made.state), made.batches[0], np.int32(0)))
    for thread in threading.enumerate():
        if thread.name.startswith("device"):
            thread.join(60)
            assert not thread.is_alive()


def test_parts_are_compiled_once(case, as_if_over_gloo):
    """The gradient for each shape of a batch, the other parts for each round."""
    made = case("plain")
    half = jax.tree.map(lambda x: x[:, :1], made.batches[0])
    short = made.parts.lower(made.state, half, np.int32(0), round=0).compile()
    one, other = made.programs[0], made.programs[1]
    assert one.compute is other.compute and one.compute is not short.compute
    assert one.send is short.send and one.send is not other.send
    assert one.apply is short.apply and one.apply is not other.apply
    short(copy(made.state), half, np.int32(0))


def test_a_replica_that_is_not_finite_is_brought_back(case):
    made = case("plain")
    state = copy(made.state)
    bad = jax.tree.map(lambda x: x.at[1].set(jnp.nan), state.params)
    new, metrics = made.programs[0](state._replace(params=bad), made.batches[0], np.int32(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(new.params))
    assert metrics["skipped"].tolist() == [0, 1, 0, 0]


def test_what_each_part_waits_for(case):
    """The gradient communicates nothing, the mix computes nothing of the model, and the update is
    made in place, up to some arrays and the flags of numbers that are finite."""
    made = case("plain")
    program = made.programs[1]
    own = program.compute.programs[0]  # of the first device
    mix, gradient, finish = (part.as_text() for part in (program.send, own, program.apply))
    assert not collectives(gradient) and not collectives(finish)
    sizes = [size for _, found, _ in collectives(mix) for size in found]
    model = made.bytes // 4
    assert model <= sum(sizes) <= model + 1  # and the flag
    assert " dot(" in gradient and " dot(" not in mix and " dot(" not in finish
    assert " sqrt(" in finish
    last = program.apply.memory_analysis()
    assert last.temp_size_in_bytes < 1.3 * made.bytes
    assert last.output_size_in_bytes == pytest.approx(last.alias_size_in_bytes, rel=0.01)
    memory = xla.memory_of(program)
    held = sum(x.nbytes for x in jax.tree.leaves((made.state, made.batches[0]))) // 4
    assert memory.state == pytest.approx(held, rel=0.01)  # and t, without counts that are new
    assert memory.temporary >= 2 * made.bytes  # the gradient, and what arrives


def test_an_update_that_is_all_late_is_in_place_too(case):
    """Decay in the gradient (L2) makes all of an update wait for the mixed parameters; all that
    is new is the gradient with the decay, of two replicas, and the update with its flags."""
    made = case("l2")
    finish = made.programs[0].apply
    assert " sqrt(" in finish.as_text()
    assert finish.memory_analysis().temp_size_in_bytes < 2.3 * 2 * made.bytes


@pytest.mark.parametrize(
    "changes",
    [{"combine": "atc"}, {"algorithm": "all_reduce"}, {"algorithm": "push_sum"}],
    ids=str,
)
def test_what_is_not_known_at_the_beginning_is_one_program(changes):
    assert callable(Trainer(**changes).parts)
