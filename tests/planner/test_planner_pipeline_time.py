"""Predicted times of pipelines against closed forms and a transcription in loops."""

import itertools

import numpy as np
import pytest
from refusals import refuses

from decent_jax import topology
from decent_jax.plan.orders import ORDERS, order
from decent_jax.planner import costs, network, placement
from decent_jax.planner.pipeline_time import (
    AVERAGING,
    Links,
    StepTime,
    averaging_s,
    exchanged,
    in_order,
    links_of,
    pipelines_s,
)


def one_pipeline_s(lists, forward, backward, latency, busy):
    """When each stage of a single pipeline with equal stages and links is done."""
    shape = len(lists), 1
    links = Links(np.full(shape, latency), np.full(shape, busy))
    compute_s = {"forward": np.full(shape, forward), "backward": np.full(shape, backward)}
    ways = {"forward": links, "backward": links}
    return pipelines_s(in_order(lists), compute_s, ways)[:, 0]


@pytest.mark.parametrize(("gbit", "latency", "wanted"), [(10, 0, 0.93), (2, 0.005, 2.48)])
def test_a_forward_pass_takes_what_was_calculated_by_hand(gbit, latency, wanted):
    """64 micro-batches of 8 MiB, 8 stages of 12.4 ms (DESIGN 9): sum of all, and the bottleneck."""
    stages, count, tau = 8, 64, 0.0124
    busy = 2**23 / (gbit * 1e9 / 8)
    lists = [[("forward", k) for k in range(count)]] * stages
    got = one_pipeline_s(lists, tau, 0.0, latency, busy).max()
    exact = stages * tau + (stages - 1) * (latency + busy) + (count - 1) * max(tau, busy)
    assert got == pytest.approx(exact, rel=1e-12) and round(got, 2) == wanted


@pytest.mark.parametrize("name", ORDERS)
def test_without_links_only_the_bubble_is_added(name):
    got = one_pipeline_s([order(name, 5, 12, s) for s in range(5)], 1.0, 2.0, 0.0, 0.0)
    assert max(got) == got[0] == 3.0 * (12 + 4)


def transcribed(lists, forward, backward, latency, busy):
    """One pipeline with links of its own, [way][stage], by asking each stage until all is done."""
    stages, clocks, places = len(lists), [0.0] * len(lists), [0] * len(lists)
    arrived, free = {}, {}
    while any(place < len(todo) for place, todo in zip(places, lists, strict=True)):
        for s in range(stages):
            if places[s] == len(lists[s]):
                continue
            way, k = lists[s][places[s]]
            source, target = (s - 1, s + 1) if way == "forward" else (s + 1, s - 1)
            if 0 <= source < stages and (way, s, k) not in arrived:
                continue
            begins = max(clocks[s], arrived.get((way, s, k), 0.0))
            clocks[s] = begins + (forward if way == "forward" else backward)[s]
            places[s] += 1
            if 0 <= target < stages:
                free[way, s] = max(clocks[s], free.get((way, s), 0.0)) + busy[way][s]
                arrived[way, target, k] = free[way, s] + latency[way][s]
    return clocks


@pytest.mark.parametrize("name", ORDERS)
def test_pipelines_side_by_side_are_each_by_itself(name):
    """Random compute and links, different both ways."""
    rng = np.random.default_rng(0)
    ways = ("forward", "backward")
    compute_s = {way: rng.uniform(0.5, 2, (4, 3)) for way in ways}
    links = {way: Links(*rng.uniform(0, 2, (2, 4, 3))) for way in ways}
    lists = [order(name, 4, 6, s) for s in range(4)]
    got = pipelines_s(in_order(lists), compute_s, links)
    for d in range(3):
        latency = {way: links[way].latency_s[:, d] for way in ways}
        busy = {way: links[way].busy_s[:, d] for way in ways}
        own = transcribed(lists, *(compute_s[way][:, d] for way in ways), latency, busy)
        np.testing.assert_allclose(got[:, d], own, rtol=1e-12)


def test_lists_that_never_end_are_refused():
    with refuses("for ever"):
        in_order([[("forward", 0)], [("forward", 1)]])


def test_links_have_their_own_direction_and_pipelines_of_a_machine_share_its_card():
    whole = network.preset("nvlink_25gbe", 2, 2)
    slower = whole.bandwidth_bytes_per_s.copy()
    slower[2:, :2] /= 1.2
    latency = np.full((4, 4), 0.011)
    latency[:2, 2:] = 0.01
    made = network.from_matrices(latency, slower, node=whole.node, nic_bytes_per_s=[1e9] * 2)
    links = links_of(made, np.array([[0, 1], [2, 3]]), 1e9)
    assert links["forward"].latency_s[0].tolist() == [0.01] * 2
    assert links["backward"].latency_s[1].tolist() == [0.011] * 2
    for way, row, rate in (("forward", 0, slower[0, 2]), ("backward", 1, slower[2, 0])):
        np.testing.assert_allclose(links[way].busy_s[row], 1e9 / min(rate, 0.5e9))


@pytest.fixture
def three_regions():
    """Stages and pipelines of 3 x 2 on seven machines of DT-FM's case 4, of regions 3, 2 and 2."""
    net = network.preset("dtfm_case4").take([0, 1, 2, 16, 17, 32, 33])
    job = placement.Job(3, 2, data_parallel_bytes=4e8, pipeline_bytes=8 * 2**23)
    return net, job, topology.make("one_peer_exp", 2)


def test_stages_average_for_the_time_of_their_own_network(three_regions):
    """Machines of one device share nothing, so each stage takes what it takes alone."""
    net, _, schedule = three_regions
    stages = np.array([[0, 3], [1, 2], [5, 4]])
    alone = [net.take(group) for group in stages]
    reduced = [costs.all_reduce_s(one, 4e8) for one in alone]
    np.testing.assert_allclose(averaging_s(net, stages, 4e8, None), reduced)
    gossiped = [costs.round_s(one, schedule, 0, 4e8) for one in alone]
    np.testing.assert_allclose(averaging_s(net, stages, 4e8, schedule), gossiped)
    # Of three pipelines one sends nothing in a round; means of groups send no permutation.
    stages = np.array([[0, 3, 5], [1, 2, 4]])
    for schedule in (topology.make("random_matching", 3), topology.make("complete", 3)):
        gossiped = [
            np.mean(
                [costs.round_s(net.take(group), schedule, r, 4e8) for r in range(schedule.period)]
            )
            for group in stages
        ]
        np.testing.assert_allclose(averaging_s(net, stages, 4e8, schedule), gossiped)


def test_averaging_hides_behind_the_pipelines_or_follows_its_stage(three_regions):
    """The last stage is done first, and then averages meanwhile."""
    net, job, schedule = three_regions
    step = StepTime(net, job, schedule, 8)
    stages, forward_s = np.arange(6).reshape(3, 2), np.full((3, 2), 0.02)
    compute_s = {"forward": forward_s, "backward": 2 * forward_s}
    lists = [order("1f1b", 3, 8, s) for s in range(3)]
    done = pipelines_s(in_order(lists), compute_s, links_of(net, stages, 2**23)).max(axis=1)
    assert done[2] < done[0]
    nothing, reduced, gossiped = (step(stages, forward_s, "1f1b", a) for a in AVERAGING)
    assert nothing == done.max()
    after = done + averaging_s(net, stages, job.data_parallel_bytes, None)
    assert reduced == after.max()
    beside = averaging_s(net, stages, job.data_parallel_bytes, schedule)
    assert gossiped == max(done.max(), beside.max())


@pytest.mark.slow
def test_exchanges_end_at_the_fastest_of_all_layouts(three_regions):
    """One machine too many, and one of half the speed: all 5040 layouts are compared."""
    net, job, schedule = three_regions
    step = StepTime(net, job, schedule, 2)
    forward = 0.0496 / np.array([1, 1, 0.5, 1, 1, 1, 1])

    def seconds_of(stages):
        return step(stages, forward[stages], "gpipe", "gossip")

    every = [np.array(one).reshape(3, 2) for one in itertools.permutations(range(7), 6)]
    seconds = list(map(seconds_of, every))
    best, slowest = min(seconds), every[int(np.argmax(seconds))]
    got = exchanged(slowest, range(7), seconds_of, time_limit_s=60, steps=2000)
    assert sorted({*got.ravel()}) == sorted(got.ravel())
    assert seconds_of(got) == pytest.approx(best, rel=1e-9) and best < 0.9 * max(seconds)
