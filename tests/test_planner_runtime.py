"""Step times: closed forms, the simulator, and a plain transcription of the recursion."""

import itertools
import json
import math

import numpy as np
import pytest

from decent_jax import topology
from decent_jax.planner import (
    compute_times,
    costs,
    fit,
    measured,
    network,
    predict,
    recommend,
    runtime,
)
from decent_jax.planner.compute_times import (
    CONSTANT,
    Constant,
    Empirical,
    LogNormal,
    ShiftedExponential,
    expected_max,
)
from decent_jax.planner.network import Link
from decent_jax.planner.runtime import AllReduce, Gossip, Workload
from decent_jax.planner.simulator import simulate

INSIDE, BETWEEN = Link(1e-6, 100e9), Link(1e-4, 1e9)


def cluster(nodes, size):
    return network.cluster([size] * nodes, INSIDE, BETWEEN)


def workload(model_bytes=50e6, compute=CONSTANT, **others):
    fields = {"forward_s": 0.04, "backward_s": 0.08, "update_s": 0.003} | others
    return Workload(model_bytes, compute=compute, **fields)


# --- compute times ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 16, 1024])
def test_the_maximum_of_shifted_exponentials_is_harmonic(n):
    harmonic = sum(1 / k for k in range(1, n + 1))
    assert expected_max(ShiftedExponential(0.7), n) == pytest.approx(0.7 + 0.3 * harmonic, 1e-6)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0])
def test_the_maximum_of_two_lognormals(sigma):
    """E max = 2 Phi(sigma / sqrt 2) for two lognormals of mean 1 (Clark 1961)."""
    phi = 0.5 * (1 + math.erf(sigma / math.sqrt(2) / math.sqrt(2)))
    assert expected_max(LogNormal(sigma), 2) == pytest.approx(2 * phi, 1e-5)


def test_the_maximum_of_measured_times_by_counting_all_outcomes():
    values = Empirical((0.8, 0.9, 1.0, 1.3))
    outcomes = np.array(np.meshgrid(*[values.values] * 3)).reshape(3, -1)
    assert expected_max(values, 3) == pytest.approx(outcomes.max(axis=0).mean())
    slow = np.array([1.0, 1.0, 1.2])
    wanted = (outcomes * slow[:, None]).max(axis=0).mean()
    assert expected_max(values, 3, slow) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "distribution", [LogNormal(0.2), ShiftedExponential(0.8), Empirical((1.0, 2.0, 4.0))]
)
def test_samples_have_mean_one_their_spread_and_their_maxima(distribution):
    rng = np.random.default_rng(0)
    drawn = distribution.sample(rng, (40000, 8))
    assert drawn.mean() == pytest.approx(1, abs=0.01)
    assert drawn.std() == pytest.approx(distribution.sd(), rel=0.03)
    assert drawn.max(axis=1).mean() == pytest.approx(expected_max(distribution, 8), rel=0.01)
    slowness = np.array([1, 1, 1, 1, 1, 1, 1.1, 1.3])
    wanted = (drawn * slowness).max(axis=1).mean()
    assert expected_max(distribution, 8, slowness) == pytest.approx(wanted, rel=0.01)


def test_a_trace_is_recognised():
    rng = np.random.default_rng(1)
    found = compute_times.fit(0.2 * LogNormal(0.15).sample(rng, 2000))
    assert found.mean_s == pytest.approx(0.2, rel=0.02)
    assert found.distribution.sigma == pytest.approx(0.15, rel=0.05)
    found = compute_times.fit(ShiftedExponential(0.9).sample(rng, 2000))
    assert found.distribution.shift == pytest.approx(0.9, rel=0.02)
    two_humps = rng.choice([1.0, 3.0], 500) * rng.uniform(0.99, 1.01, 500)
    assert isinstance(compute_times.fit(two_humps).distribution, Empirical)
    assert isinstance(compute_times.fit([0.1, 0.1, 0.1]).distribution, Constant)
    averaged = LogNormal(0.2).sample(rng, (4000, 10)).mean(axis=1)
    found = compute_times.fit(averaged, steps_per_time=10)
    assert found.distribution.sigma == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 0.0], [1.0, math.nan], [1.0, -1.0]])
def test_bad_traces_are_refused(times):
    with pytest.raises(ValueError, match="at least two positive step times"):
        compute_times.fit(times)


def test_a_run_folder_is_read_without_its_first_row(tmp_path):
    rows = [{"step": 10 * k, "perf/step_time_s": 9.0 if k == 1 else 0.1 * k} for k in range(1, 5)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 40, "eval/loss": 1.0}])
    (tmp_path / "metrics.jsonl").write_text(text)
    times, steps = compute_times.read_trace(tmp_path)
    np.testing.assert_allclose(times, [0.2, 0.3, 0.4])
    assert steps == 10
    with pytest.raises(ValueError, match="cannot read the trace"):
        compute_times.read_trace(tmp_path / "absent")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="at least 3"):
        compute_times.read_trace(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("torn {")
    with pytest.raises(ValueError, match="is not a metrics"):
        compute_times.read_trace(tmp_path)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: LogNormal(0), "sigma"),
        (lambda: ShiftedExponential(1.0), "shift"),
        (lambda: Empirical((1.0,)), "at least two"),
        (lambda: workload(forward_s=-1), "forward_s"),
        (lambda: workload(forward_s=0, backward_s=0), "above 0"),
        (lambda: workload(late_bytes=1e12), "late_bytes"),
        (lambda: Gossip(topology.make("ring", 4), mix_every=0), "mix_every"),
        (lambda: Gossip(topology.make("ring", 4), combine="before"), "combine"),
        (lambda: Gossip(topology.make("ring", 4), wire="int4"), "wire"),
        (lambda: workload(slowness=(1.0, 2.0)).factors(4), "2 factors for 4"),
    ],
)
def test_numbers_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# --- all-reduce ---------------------------------------------------------------------------------


def test_all_reduce_by_hand():
    """Four buckets of 10 MB over a link of 1 GB/s between two machines: 10 ms each by a ring."""
    whole = network.cluster([1, 1], INSIDE, Link(0.0, 1e9))
    fast = workload(40e6)  # backward 20 ms a bucket: only the last one shows
    assert runtime.all_reduce_step_s(whole, fast, AllReduce("ring", 10e6)) == pytest.approx(
        0.04 + 0.08 + 0.01 + 0.003
    )
    slow = workload(400e6)  # 100 ms a bucket: all of it after the first
    assert runtime.all_reduce_step_s(whole, slow, AllReduce("ring", 100e6)) == pytest.approx(
        0.04 + 0.02 + 4 * 0.1 + 0.003
    )
    assert runtime.all_reduce_step_s(whole, slow, AllReduce("ring", math.inf)) == pytest.approx(
        0.12 + 0.4 + 0.003
    )
    late = workload(60e6, late_bytes=20e6)  # the tied embedding hides behind nothing
    assert runtime.all_reduce_step_s(whole, late, AllReduce("ring", 10e6)) == pytest.approx(
        0.12 + 0.01 + 0.02 + 0.003
    )


@pytest.mark.parametrize("k, collective", list(enumerate(["ring", "tree", "auto", "hierarchical"])))
@pytest.mark.parametrize("j, model_bytes", list(enumerate([5e6, 100e6, 300e6])))
def test_all_reduce_simulated_is_the_closed_form(k, collective, j, model_bytes):
    """Every collective on every size, with and without gradients that are late."""
    whole, late = cluster(2, 4), 0.3 * ((j + k) % 2)
    algorithm = AllReduce(collective, 25e6)
    constant = workload(model_bytes, late_bytes=late * model_bytes)
    exact = runtime.all_reduce_step_s(whole, constant, algorithm)
    assert simulate(whole, constant, algorithm, steps=3).step_s == pytest.approx(exact, 1e-9)
    varying = workload(model_bytes, LogNormal(0.2), late_bytes=late * model_bytes)
    exact = runtime.all_reduce_step_s(whole, varying, algorithm)
    assert simulate(whole, varying, algorithm, steps=1000).step_s == pytest.approx(exact, 0.015)


def test_all_reduce_waits_for_the_slowest_replica():
    slow = workload(1e3, slowness=(1, 1, 1, 1, 1, 1, 1, 2.0))
    assert runtime.all_reduce_step_s(cluster(2, 4), slow) == pytest.approx(0.24 + 0.003, 0.02)


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


@pytest.mark.parametrize("name", ["hypercube", "alternating_exp_ring", "ring", "complete"])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("model_bytes", [20e6, 120e6])
def test_gossip_simulated_is_the_recursion_transcribed(name, parts, model_bytes):
    whole = cluster(2, 4)
    schedule = topology.make(name, 8, local_size=4)
    varying = workload(model_bytes, LogNormal(0.3))
    bucket_bytes = math.inf if parts == 1 else model_bytes / parts
    algorithm = Gossip(schedule, execution="all_reduce", bucket_bytes=bucket_bytes)
    run = simulate(whole, varying, algorithm, steps=24, warm_up=0, seed=5)
    factor = LogNormal(0.3).sample(np.random.default_rng(5), run.ends_s.shape)
    durations, groups = [], []
    for one in schedule.rounds:
        [stage] = costs.round_stages(whole, one, model_bytes / parts, "all_reduce")
        durations.append(stage.duration_s)
        members = costs.mean_groups(one)
        groups.append([next(m for m in members if i in m) for i in range(8)])
    wanted = transcribed(durations, groups, 0.04 * factor, 0.08 * factor, 0.003, parts, len(factor))
    np.testing.assert_allclose(run.ends_s, wanted, rtol=1e-12)


@pytest.mark.parametrize("mix_every", [1, 3])
@pytest.mark.parametrize("model_bytes", [20e6, 60e6, 500e6])
def test_gossip_of_equal_replicas_has_a_closed_form(model_bytes, mix_every):
    """Compute constant, every replica alike: each step takes the longer of the two, plus U."""
    whole = cluster(8, 1)
    schedule = topology.make("one_peer_exp", 8)
    seconds = [costs.round_s(whole, schedule, r, model_bytes) for r in range(3)]
    mixing = np.mean([max(0.12, one) for one in seconds]) + 0.003
    wanted = (mixing + (mix_every - 1) * 0.123) / mix_every
    algorithm = Gossip(schedule, mix_every)
    lower, upper = runtime.gossip_bounds(whole, workload(model_bytes), algorithm)
    assert lower == pytest.approx(wanted) == upper
    run = simulate(whole, workload(model_bytes), algorithm, steps=18, warm_up=9)
    assert run.step_s == pytest.approx(wanted)


def test_then_exposes_what_with_hides():
    whole, schedule = cluster(8, 1), topology.make("one_peer_exp", 8)
    seconds = costs.round_s(whole, schedule, 0, 60e6)
    then = Gossip(schedule, combine="then")
    assert simulate(whole, workload(60e6), then).step_s == pytest.approx(0.123 + seconds)
    assert runtime.gossip_bounds(whole, workload(60e6), then)[0] == pytest.approx(0.123 + seconds)


NAMES = ("complete", "ring", "bidirectional_ring", "one_peer_exp", "hypercube")
NAMES += ("alternating_exp_ring", "star", "hierarchical")


OPTIONS = ({}, {"combine": "then"}, {"mix_every": 2}, {"bucket_bytes": 10e6})
WORK = list(itertools.product((CONSTANT, ShiftedExponential(0.6)), (10e6, 120e6)))


@pytest.mark.parametrize("k, name", list(enumerate(NAMES)))
@pytest.mark.parametrize("j, options", list(enumerate(OPTIONS)))
def test_gossip_stays_between_its_bounds(k, name, j, options):
    """Every pair of a schedule, an option and a workload, in 32 of the 128 combinations."""
    compute, model_bytes = WORK[(j + k) % len(WORK)]
    whole = cluster(2, 4)
    algorithm = Gossip(topology.make(name, 8, local_size=4), **options)
    work = workload(model_bytes, compute)
    lower, upper = runtime.gossip_bounds(whole, work, algorithm)
    found = simulate(whole, work, algorithm, steps=240, warm_up=60).step_s
    noise = 1e-9 if compute == CONSTANT else 0.04
    assert lower * (1 - noise) <= found <= upper * (1 + noise)
    # The parameters of a bucket cannot wait longer than the barrier in every step lets them.
    assert lower <= upper


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


def test_gossip_cannot_outrun_a_replica_that_is_always_slow():
    slow = workload(1e3, slowness=(1.0,) * 7 + (1.5,))
    gossip = Gossip(topology.make("one_peer_exp", 8))
    assert simulate(cluster(8, 1), slow, gossip, steps=300, warm_up=300).step_s == pytest.approx(
        0.18 + 0.003, rel=1e-3
    )


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
    assert len(first.ends_s) == 12 + 6
    with pytest.raises(ValueError, match="steps must be at least 1"):
        simulate(whole, work, algorithm, steps=0)
    with pytest.raises(ValueError, match=r"for 8 replicas.*4 devices"):
        simulate(cluster(1, 4), work, algorithm)


# --- predictions --------------------------------------------------------------------------------


def test_the_parts_of_a_prediction_add_up_and_name_the_largest():
    whole = cluster(2, 4)
    for model_bytes, dominant in ((1e3, "compute"), (500e6, "communication")):
        for row in predict.compare(whole, workload(model_bytes, LogNormal(0.1))):
            assert row.compute_s + row.exposed_s + row.waiting_s == pytest.approx(row.step_s)
            assert min(row.exposed_s, row.waiting_s) >= -1e-12
            if row.label not in ("alternating_exp_ring", "hierarchical"):
                assert row.dominant == dominant, row
    wild = workload(1e3, LogNormal(1.5))
    [row] = predict.compare(whole, wild, ("all_reduce",))
    assert row.dominant == "stragglers"


def test_compare_leaves_out_what_does_not_exist_unless_it_was_asked_for():
    whole = cluster(3, 1)
    labels = {row.label for row in predict.compare(whole, workload())}
    assert labels >= {"all_reduce", "complete", "bidirectional_ring", "one_peer_exp"}
    assert not labels & {"ring", "hypercube", "alternating_exp_ring", "all_reduce_hierarchical"}
    with pytest.raises(ValueError, match="ring needs an even number"):
        predict.compare(whole, workload(), ("ring",))
    with pytest.raises(ValueError, match="'gossip'"):
        predict.compare(whole, workload(), ("gossip",))


def test_all_reduce_is_given_its_best_bucket_size():
    far = network.regions({"Oregon": 2, "Tokyo": 2})
    tuned = predict.algorithm_of("all_reduce", far, workload(500e6))
    assert tuned.bucket_bytes == math.inf  # latency of 100 ms a bucket
    near = predict.algorithm_of("all_reduce", cluster(2, 4), workload(500e6))
    assert near.bucket_bytes == 25e6
    asked = predict.algorithm_of("all_reduce", far, workload(500e6), bucket_bytes=1e6)
    assert asked.bucket_bytes == 1e6


def test_local_size_needs_consecutive_devices_in_equal_nodes():
    assert predict.local_size(cluster(2, 4)) == 4
    assert predict.local_size(network.cluster([3, 1], INSIDE, BETWEEN)) == 1
    assert predict.local_size(cluster(2, 2).take([0, 2, 1, 3])) == 1


# --- recommendation -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, n, local_size, m",
    [
        ("complete", 8, 1, 1.0),
        ("one_peer_exp", 8, 1, 3.0),
        ("hypercube", 16, 1, 4.0),
        # ring of 8: two rounds leave .7071 of the distance, half its square (REFERENCE.md B)
        ("ring", 8, 1, 4.0),
        ("bidirectional_ring", 8, 1, 1 / (1 - 0.804738**2)),
        # exact after 4 rounds from even phases, after 5 from odd ones
        ("alternating_exp_ring", 16, 4, 5.0),
        ("alternating_exp_ring", 8, 4, 2.0),
    ],
)
def test_steps_per_averaging(name, n, local_size, m):
    schedule = topology.make(name, n, local_size=local_size)
    assert recommend.steps_per_averaging(schedule) == pytest.approx(m, rel=1e-4)
    assert recommend.steps_per_averaging(schedule, 4) == pytest.approx(4 * m, rel=1e-4)


# Losses after 20, 40, 80 tokens a parameter: all-reduce, 4 and 8 replicas (REFERENCE.md D).
PUBLISHED_LOSS = {
    1: (3.5498, 3.4299, 3.3474),
    4: (3.5703, 3.4413, 3.3512),
    8: (3.5856, 3.4475, 3.3554),
}


@pytest.mark.parametrize("n", [4, 8])
def test_the_slow_down_is_that_of_the_published_losses(n):
    tokens = np.array([20.0, 40.0, 80.0])
    one, two, four = PUBLISHED_LOSS[1]
    floor = (one * four - two**2) / (one + four - 2 * two)
    power = math.log2((one - floor) / (two - floor))
    scale = (one - floor) * 20**power
    as_good_as = (scale / (np.array(PUBLISHED_LOSS[n]) - floor)) ** (1 / power)
    excess = tokens / as_good_as - 1
    m = recommend.steps_per_averaging(topology.make("one_peer_exp", n))
    predicted = np.array([recommend.slow_down(n, m, count) for count in tokens]) - 1
    np.testing.assert_allclose(predicted, excess, rtol=0.17)


def test_the_recommendation_is_the_least_time_to_the_same_quality():
    whole = cluster(4, 4)
    found = recommend.choices(whole, workload(100e6, LogNormal(0.1)), mix_every=(1, 4))
    costs_s = [choice.prediction.step_s * choice.slow_down for choice in found]
    assert costs_s == sorted(costs_s)
    assert [choice.slow_down for choice in found if choice.prediction.label == "all_reduce"] == [1]
    assert max(choice.slow_down for choice in found) <= 1.5
    text = recommend.explain(found)
    assert text.startswith(f"Take {found[0].prediction.label}: ")
    assert "all_reduce is" in text


def test_fast_networks_get_all_reduce_and_slow_ones_gossip():
    fast = network.cluster([4], Link(1e-7, 1e13), BETWEEN)
    best = recommend.choices(fast, workload(100e6))[0]
    assert best.algorithm.name == "all_reduce"
    assert recommend.config_lines(best) == [
        "config.num_replicas = 4",
        'config.algorithm = "all_reduce"',
    ]
    slow = recommend.choices(cluster(4, 4), workload(300e6), executions=("hierarchical", "plain"))
    assert slow[0].algorithm.name != "all_reduce"


def test_config_lines_say_everything_a_schedule_needs():
    schedule = topology.make("alternating_exp_ring", 8, local_size=4)
    gossip = Gossip(schedule, mix_every=2, wire="int8")
    row = predict.predict(cluster(2, 4), workload(), gossip)
    lines = recommend.config_lines(recommend.Choice(gossip, row, 1.1, 4), "all_reduce")
    assert lines == [
        "config.num_replicas = 8",
        'config.algorithm = "accum_adam"',
        'config.schedule = "alternating_exp_ring"',
        'config.combine = "with"',
        "config.mix_every = 2",
        "config.local_size = 4",
        'config.comm_dtype = "int8"',
    ]


def test_a_compressed_wire_takes_its_share_of_the_time():
    whole, schedule = cluster(8, 1), topology.make("one_peer_exp", 8)
    step = {
        wire: simulate(whole, workload(1e9), Gossip(schedule, wire=wire), steps=3).step_s - 0.003
        for wire in ("float32", "bfloat16", "int8")
    }
    assert step["bfloat16"] == pytest.approx(step["float32"] / 2, rel=1e-3)
    assert step["int8"] == pytest.approx(step["float32"] / 4 * (1 + 1 / 64), rel=1e-3)
    # A mean over a group is a sum, which is not formed of compressed terms.
    both = [
        runtime.gossip_bounds(whole, workload(1e9), Gossip(topology.make("complete", 8), wire=wire))
        for wire in ("float32", "int8")
    ]
    assert both[0] == both[1]


# --- measured -----------------------------------------------------------------------------------


def test_step_times_that_this_project_measured_on_two_hosts():
    """Throttled links: compute 134 ms, communication 269 ms; gossip 298 ms, all-reduce 392 ms.

    On CPU hosts nothing overlaps an all-reduce: one bucket, after the backward pass.
    """
    hosts = network.cluster([1, 1], INSIDE, Link(1e-4, 25e6))
    work = Workload(0.269 * 25e6, 0.134 / 3, 2 * 0.134 / 3)
    rows = [
        {"algorithm": "one_peer_exp", "num_replicas": 2, "step_time_s": 0.298},
        {"algorithm": "all_reduce", "num_replicas": 2, "step_time_s": 0.392},
    ]
    _, compared = measured.compare(rows, {2: hosts}, work, bucket_bytes=math.inf)
    assert [row["fitted"] for row in compared] == [False, False]
    for row in compared:
        assert abs(row["error"]) < 0.15, row


def test_rows_may_say_how_they_were_run():
    hosts, work = cluster(4, 1), workload(200e6)
    row = {"algorithm": "one_peer_exp", "num_replicas": 4, "step_time_s": 1.0}
    plain = measured.predict_s(row, hosts, work)
    assert measured.predict_s(row | {"comm_dtype": "bfloat16"}, hosts, work) < plain
    assert measured.predict_s(row | {"mix_every": 4}, hosts, work) < plain
    assert measured.predict_s(row | {"combine": "then"}, hosts, work) > plain
    assert measured.predict_s(row | {"compute_s": 1.0}, hosts, work) == pytest.approx(1.003)
    assert measured.predict_s(row, hosts, work, bandwidth=0.5) > plain
    pairs = row | {"algorithm": "alternating_exp_ring", "local_size": 2}
    assert measured.predict_s(pairs, hosts, work) > 0.123
    with pytest.raises(ValueError, match="local_size"):
        measured.predict_s(pairs | {"local_size": None}, hosts, work)
    with pytest.raises(ValueError, match="what can be fitted is"):
        measured.compare([row], {4: hosts}, work, fitted=["latency"])


# --- fitting ------------------------------------------------------------------------------------


def test_fitting_finds_the_constants_that_made_the_rows():
    def model(row, compute_s, overhead_s):
        return compute_s / row["num_replicas"] + overhead_s

    rows = [{"num_replicas": n, "step_time_s": 3.0 / n + 0.2} for n in (1, 2, 8)]
    found = fit.fit(rows, model, {"compute_s": 1.0, "overhead_s": 1.0})
    assert found == pytest.approx({"compute_s": 3.0, "overhead_s": 0.2}, rel=1e-4)
    assert fit.compared(rows[0], 3.52, False)["error"] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="between 1 and 4 constants"):
        fit.fit(rows, model, dict.fromkeys("abcde", 1.0))
    with pytest.raises(ValueError, match="cannot be fitted to 1 rows"):
        fit.fit(rows[:1], model, {"compute_s": 1.0, "overhead_s": 1.0})


@pytest.mark.parametrize(
    "line, words",
    [
        ("nonsense", "line 1 is not JSON"),
        ('{"algorithm": "ring"}', "needs algorithm, num_replicas and step_time_s"),
        ('{"algorithm": "ring", "num_replicas": 4, "step_time_s": 0}', "seconds above 0"),
        ('{"algorithm": "ring", "num_replicas": 0, "step_time_s": 1}', "at least 1"),
        ("", "has no rows"),
    ],
)
def test_bad_rows_are_refused(tmp_path, line, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=words):
        fit.read_rows(path)
    with pytest.raises(ValueError, match="cannot read"):
        fit.read_rows(tmp_path / "absent")
