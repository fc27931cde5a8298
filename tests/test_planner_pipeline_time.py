"""Predicted times of pipelines against closed forms."""

import numpy as np
import pytest

from decent_jax.planner import network
from decent_jax.planner.pipeline_time import Link, finished_s, links_of, step_s
from decent_jax.topology.orders import order


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
