"""Predicted times of pipelines against closed forms."""

import itertools

import numpy as np
import pytest

from decent_jax import topology
from decent_jax.plan.orders import order
from decent_jax.planner import network, placement
from decent_jax.planner.pipeline_time import (
    Link,
    StepTime,
    all_reduce_s,
    exchanged,
    finished_s,
    gossip_s,
    links_of,
    step_s,
)


@pytest.mark.parametrize(("gbit", "latency", "wanted"), [(10, 0, 0.93), (2, 0.005, 2.48)])
def test_a_forward_pass_takes_what_was_calculated_by_hand(gbit, latency, wanted):
    """64 micro-batches of 8 MiB, 8 stages of 12.4 ms (DESIGN 9): sum of all, and the bottleneck."""
    stages, count, tau = 8, 64, 0.0124
    link = Link(latency, 2**23 / (gbit * 1e9 / 8))
    lists = [[("forward", k) for k in range(count)]] * stages
    got = max(finished_s(lists, [tau] * stages, [0.0] * stages, [link] * (stages - 1)))
    bottleneck = max(tau, link.transfer_s)
    exact = stages * tau + (stages - 1) * sum(link) + (count - 1) * bottleneck
    assert got == pytest.approx(exact, rel=1e-12) and round(got, 2) == wanted


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_without_links_only_the_bubble_is_added(name):
    lists = [order(name, 5, 12, s) for s in range(5)]
    got = finished_s(lists, [1.0] * 5, [2.0] * 5, [Link(0, 0)] * 4)
    assert max(got) == got[0] == 3.0 * (12 + 4)


def test_slow_links_cost_1f1b_more_than_gpipe():
    """Its few inputs under way do not cover a long latency; gpipe's do entirely."""
    one, pipe = (
        max(
            finished_s(
                [order(name, 4, 16, s) for s in range(4)], [1.0] * 4, [1.0] * 4, [Link(5, 0.1)] * 3
            )
        )
        for name in ("1f1b", "gpipe")
    )
    assert pipe == pytest.approx(2 * 16 + 2 * (3 * 1 + 3 * 5.1))
    assert one > 2 * pipe


def test_links_are_those_of_the_slower_direction():
    whole = network.preset("two_racks_25gbe", 2, 1)
    slower = whole.bandwidth_bytes_per_s.copy()
    slower[1, 0] /= 1.2
    latency = np.array([[0, 0.01], [0.011, 0]])
    made = network.from_matrices(latency, slower)
    (link,) = links_of(made, [0, 1], 1e9)
    assert link == (0.011, pytest.approx(1e9 / slower[1, 0]))


def test_averaging_hides_behind_the_pipelines_or_follows_its_stage():
    """Two pipelines of two stages: the last stage is done first, and then averages meanwhile."""
    finished = [[3.0, 2.5], [4.0, 3.5]]
    assert step_s(finished, [2.0, 1.0], hidden=True) == 4.0
    assert step_s(finished, [1.0, 5.0], hidden=True) == 5.0
    assert step_s(finished, [1.0, 1.0], hidden=False) == 5.0
    assert step_s(finished, [1.0, 2.0], hidden=False) == 5.5


def test_lists_that_never_end_are_refused():
    with pytest.raises(ValueError, match="for ever"):
        finished_s([[("forward", 0)], [("forward", 1)]], [1.0] * 2, [1.0] * 2, [Link(0, 0)])


@pytest.fixture
def three_regions():
    """Stages and pipelines of 3 x 2 on seven machines of DT-FM's case 4, of regions 3, 2 and 2."""
    net = network.preset("dtfm_case4").take([0, 1, 2, 16, 17, 32, 33])
    job = placement.Job(3, 2, data_parallel_bytes=4e8, pipeline_bytes=8 * 2**23)
    return net, job, topology.make("one_peer_exp", 2)


def test_steps_are_those_of_the_parts_that_layouts_share(three_regions):
    net, job, schedule = three_regions
    times = StepTime(net, job, schedule, "1f1b", 8)
    given = np.array([[0.01, 0.02], [0.01, 0.01], [0.03, 0.01]])
    lists = [order("1f1b", 3, 8, s) for s in range(3)]
    listed, other = np.arange(6).reshape(3, 2), np.array([[6, 1], [0, 2], [4, 3]])
    for stages, forward in ((listed, given), (other, given), (listed, 2 * given)):
        finished = [
            finished_s(lists, way, 2 * way, links_of(net, column, 2**23))
            for column, way in zip(stages.T, forward.T, strict=True)
        ]
        got = times(stages, forward)
        assert got.nothing_s == max(map(max, finished))
        reduced = [all_reduce_s(net, job, group) for group in stages]
        gossiped = [gossip_s(net, job, group, schedule) for group in stages]
        assert got.all_reduce_s == step_s(finished, reduced, hidden=False)
        assert got.gossip_s == step_s(finished, gossiped, hidden=True)


@pytest.mark.parametrize("what", ["all_reduce_s", "gossip_s"])
def test_exchanges_end_at_the_fastest_of_all_layouts(three_regions, what):
    """One machine too many, and one of half the speed: all 5040 layouts are compared."""
    net, job, schedule = three_regions
    times = StepTime(net, job, schedule, "gpipe", 8)
    forward = 0.0124 / np.array([1, 1, 0.5, 1, 1, 1, 1])

    def seconds_of(stages):
        return getattr(times(stages, forward[stages]), what)

    every = [np.array(one).reshape(3, 2) for one in itertools.permutations(range(7), 6)]
    best = min(map(seconds_of, every))
    slowest = max(every, key=seconds_of)
    got = exchanged(slowest, range(7), seconds_of, time_limit_s=60, steps=4000)
    assert sorted({*got.ravel()}) == sorted(got.ravel())
    assert seconds_of(got) == pytest.approx(best, rel=1e-9) and best < 0.9 * seconds_of(slowest)


def test_without_time_it_is_the_fastest_of_the_layouts_to_begin_with(three_regions):
    net, job, schedule = three_regions
    times = StepTime(net, job, schedule, "gpipe", 8)

    def seconds_of(stages):
        return times(stages, np.full((3, 2), 0.01)).gossip_s

    given = np.array([[6, 0], [5, 1], [4, 2]])
    starts = [given, np.arange(6).reshape(2, 3).T, np.arange(6).reshape(3, 2)]
    got = exchanged(given, range(7), seconds_of, time_limit_s=0.0)
    assert seconds_of(got) == min(map(seconds_of, starts)) < max(map(seconds_of, starts))
