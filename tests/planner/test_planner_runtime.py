"""Step times: closed forms, the simulator, and a plain transcription of the recursion."""

import itertools
import math

import numpy as np
import pytest
from clusters import INSIDE, cluster, workload
from refusals import refuses

from decent_jax import topology
from decent_jax.planner import costs, network, predict, runtime
from decent_jax.planner.network import Link
from decent_jax.planner.runtime import (
    CONSTANT,
    AllReduce,
    Gossip,
    LogNormal,
    expected_max,
)
from decent_jax.planner.simulator import simulate

# --- compute times ------------------------------------------------------------------------------


class ShiftedExponential:
    """``shift + (1 - shift) Exp(1)``: rare long interruptions, and maxima in closed form."""

    def __init__(self, shift):
        self.shift = shift

    def sample(self, rng, shape):
        return self.shift + (1 - self.shift) * rng.standard_exponential(shape)

    def exceeded(self, probability):
        return self.shift - (1 - self.shift) * np.log(probability)


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0])
def test_the_maximum_of_two_lognormals(sigma):
    """E max = 2 Phi(sigma / sqrt 2) for two lognormals of mean 1 (Clark 1961)."""
    phi = 0.5 * (1 + math.erf(sigma / math.sqrt(2) / math.sqrt(2)))
    assert expected_max(LogNormal(sigma), 2) == pytest.approx(2 * phi, 1e-5)


@pytest.mark.parametrize("distribution", [LogNormal(0.2), ShiftedExponential(0.8)])
def test_samples_have_mean_one_their_spread_and_their_maxima(distribution):
    drawn = distribution.sample(np.random.default_rng(0), (40000, 8))
    assert drawn.mean() == pytest.approx(1, abs=0.01)
    values, weights = runtime.max_nodes(distribution, [1.0])
    assert drawn.var() == pytest.approx(weights @ (values - 1) ** 2, rel=0.06)
    for slowness in (np.ones(8), np.array([1, 1, 1, 1, 1, 1, 1.1, 1.3])):
        values, weights = runtime.max_nodes(distribution, slowness)
        wanted = (drawn * slowness).max(axis=1).mean()
        assert values @ weights == pytest.approx(wanted, rel=0.01)


def test_a_trace_is_recognized():
    drawn = LogNormal(0.2).sample(np.random.default_rng(1), (4000, 10))
    for times, count in ((drawn, 1), (drawn.mean(axis=1), 10)):
        mean_s, variation = runtime.fit(0.2 * times, count)
        assert (mean_s, variation.sigma) == pytest.approx((0.2, 0.2), rel=0.05)
    assert runtime.fit(np.full(3, 0.25)) == (0.25, CONSTANT)


# --- all-reduce ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_bytes, late_bytes, bucket_bytes, seconds",
    [
        (40e6, 0, 10e6, 0.12 + 0.01),  # backward takes 20 ms a bucket: only the last one shows
        (400e6, 0, 100e6, 0.04 + 0.02 + 4 * 0.1),  # 100 ms a bucket: all of it after the first
        (400e6, 0, math.inf, 0.12 + 0.4),
        (60e6, 20e6, 10e6, 0.12 + 0.01 + 0.02),  # the tied embedding hides behind nothing
    ],
)
def test_all_reduce_by_hand(model_bytes, late_bytes, bucket_bytes, seconds):
    """Buckets over a link of 1 GB/s between two machines: as long by a ring as one transfer."""
    whole = network.cluster([1, 1], INSIDE, Link(0.0, 1e9))
    work, ring = workload(model_bytes, late_bytes=late_bytes), AllReduce("ring", bucket_bytes)
    assert runtime.all_reduce_step_s(whole, work, ring) == pytest.approx(seconds + 0.003)


@pytest.mark.parametrize(
    ("collective", "model_bytes", "late"),
    [("ring", 5e6, 0.3), ("tree", 100e6, 0), ("auto", 300e6, 0.3), ("hierarchical", 100e6, 0.3)],
)
def test_all_reduce_simulated_is_the_closed_form(collective, model_bytes, late):
    """Every collective, with and without gradients that are late."""
    whole = cluster(2, 4)
    algorithm = AllReduce(collective, 25e6)
    constant = workload(model_bytes, late_bytes=late * model_bytes)
    exact = runtime.all_reduce_step_s(whole, constant, algorithm)
    assert simulate(whole, constant, algorithm, steps=3).step_s == pytest.approx(exact, 1e-9)
    varying = workload(model_bytes, LogNormal(0.2), late_bytes=late * model_bytes)
    exact = runtime.all_reduce_step_s(whole, varying, algorithm)
    assert simulate(whole, varying, algorithm, steps=1000).step_s == pytest.approx(exact, 0.015)


def test_all_reduce_waits_for_the_slowest_replica():
    slow = workload(1e3, slowness=(1, 1, 1, 1, 1, 1, 1, 2.0))
    assert runtime.all_reduce_step_s(cluster(2, 4), slow, AllReduce()) == pytest.approx(
        0.24 + 0.003, 0.02
    )


# --- gossip -------------------------------------------------------------------------------------


def transcribed(durations, groups, forward, backward, update, parts, steps):
    """The recursion as REFERENCE.md has it, for one duration a group; numbers in loops.

    durations[r][i]: of one bucket; groups[r][i]: who i averages with; forward[t][i], ...
    Returns when each replica has finished each step.
    """
    n, ends = len(groups[0]), []
    done = [0.0] * n
    comm_end = [0.0] * n
    c = [[0.0] * n for _ in range(parts)]

    def communicate(r, bucket, d):
        ready = [max(d[j], comm_end[j]) for j in range(n)]
        end = [durations[r][i] + max(ready[j] for j in groups[r][i]) for i in range(n)]
        for i in range(n):
            c[bucket][i] = comm_end[i] = end[i]

    for bucket in range(parts):
        communicate(0, bucket, done)
    for t in range(steps):
        d = [done[i] + forward[t][i] for i in range(n)]
        for bucket in range(parts):
            for i in range(n):
                d[i] = max(d[i] + backward[t][i] / parts, c[bucket][i]) + update / parts
            communicate((t + 1) % len(durations), bucket, d)
        done = d
        ends.append(done)
    return np.array(ends)


@pytest.mark.parametrize(
    ("name", "parts", "model_bytes"),
    [
        ("hypercube", 1, 20e6),
        ("alternating_exp_ring", 4, 120e6),
        ("ring", 4, 20e6),
        ("complete", 1, 120e6),
    ],
)
def test_gossip_simulated_is_the_recursion_transcribed(name, parts, model_bytes):
    whole = cluster(2, 4)
    schedule = topology.make(name, 8, replicas_per_node=4)
    varying = workload(model_bytes, LogNormal(0.3))
    bucket_bytes = math.inf if parts == 1 else model_bytes / parts
    algorithm = Gossip(schedule, execution="all_reduce", bucket_bytes=bucket_bytes)
    run = simulate(whole, varying, algorithm, steps=24, warm_up=0, seed=5)
    factor = LogNormal(0.3).sample(np.random.default_rng(5), run.ends_s.shape)
    durations, groups = [], []
    for one in schedule.rounds:
        [stage] = costs.round_phases(whole, one, model_bytes / parts, "all_reduce")
        durations.append(stage.duration_s)
        members = costs.mean_groups(one)
        groups.append([next(m for m in members if i in m) for i in range(8)])
    wanted = transcribed(durations, groups, 0.04 * factor, 0.08 * factor, 0.003, parts, len(factor))
    np.testing.assert_allclose(run.ends_s, wanted, rtol=1e-12)


@pytest.mark.parametrize(("mix_every", "model_bytes"), [(1, 20e6), (3, 60e6), (1, 500e6)])
def test_gossip_of_equal_replicas_has_a_closed_form(model_bytes, mix_every):
    """Compute constant, every replica alike: each step takes the longer of the two, plus U."""
    whole = cluster(8, 1)
    schedule = topology.make("one_peer_exp", 8)
    seconds = [costs.round_s(whole, schedule, r, model_bytes) for r in range(3)]
    mixing = np.mean([max(0.12, one) for one in seconds]) + 0.003
    wanted = (mixing + (mix_every - 1) * 0.123) / mix_every
    algorithm = Gossip(schedule, mix_every)
    run = simulate(whole, workload(model_bytes), algorithm, steps=18, warm_up=9)
    assert run.step_s == pytest.approx(wanted)


def test_then_exposes_what_with_hides():
    whole, schedule = cluster(8, 1), topology.make("one_peer_exp", 8)
    seconds = costs.round_s(whole, schedule, 0, 60e6)
    then = Gossip(schedule, combine="atc")
    assert simulate(whole, workload(60e6), then).step_s == pytest.approx(0.123 + seconds)


def test_gossip_waits_for_neighbours_only():
    """Rare long interruptions: a ring loses less than complete, and both less than all-reduce."""
    whole = cluster(32, 1)
    jitter = workload(1e3, ShiftedExponential(0.8))
    lost = {
        name: predict.step_s(whole, jitter, predict.algorithm_of(name, whole, jitter)) - 0.123
        for name in ("all_reduce", "complete", "one_peer_exp", "ring")
    }
    assert lost["all_reduce"] == pytest.approx(
        0.12 * 0.2 * (sum(1 / k for k in range(1, 33)) - 1), rel=0.05
    )
    assert lost["ring"] < lost["one_peer_exp"] < lost["complete"] < lost["all_reduce"]
    assert lost["one_peer_exp"] < 0.6 * lost["all_reduce"]


def test_events_are_what_the_step_is_made_of():
    whole = cluster(2, 2)
    algorithm = Gossip(topology.make("hypercube", 4))
    work = workload(200e6, LogNormal(0.1))
    run = simulate(whole, work, algorithm, steps=4, warm_up=0, record=True)
    for replica in range(4):
        busy = [e for e in run.events if e.replica == replica and e.kind != "communicate"]
        busy.sort(key=lambda event: event.start_s)
        assert busy[0].start_s == 0
        for before, after in itertools.pairwise(busy):
            assert after.start_s == pytest.approx(before.end_s)  # no gap: waiting is an event
        assert busy[-1].end_s == pytest.approx(run.ends_s[-1, replica])
    kinds = {event.kind for event in run.events}
    assert kinds == {"forward", "backward", "update", "wait", "communicate"}


def test_the_same_seed_gives_the_same_run_and_lengths_are_whole_periods():
    whole, algorithm = cluster(2, 4), Gossip(topology.make("hypercube", 8), mix_every=2)
    work = workload(compute=LogNormal(0.1))
    first, second = (simulate(whole, work, algorithm, steps=10, warm_up=1) for _ in range(2))
    np.testing.assert_array_equal(first.ends_s, second.ends_s)
    assert first.events == ()
    assert len(first.ends_s) == 12 + 6
    with refuses(8, 4):
        simulate(cluster(1, 4), work, algorithm)
