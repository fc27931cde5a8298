"""The order of micro-batches: complete, without deadlock, in the least memory and time."""

import itertools

import pytest
from refusals import refused

from decent_jax.plan import orders

SIZES = [(s, m) for s in range(1, 9) for m in (*range(1, 10), 16, 31, 32)]


def run(name, stages, micro_batches, forward=1.0, backward=1.0):
    """Seconds of a step in which an action begins when what it needs has come, which may never be.

    Also the largest number of inputs that each stage keeps.
    """
    lists = [orders.order(name, stages, micro_batches, s) for s in range(stages)]
    done, clocks, next_, kept, most = {}, [0.0] * stages, [0] * stages, [0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while next_[s] < len(lists[s]):
                action, k = lists[s][next_[s]]
                needs = [("forward", s - 1, k)] if s else []
                if action == "backward":
                    last = s == stages - 1
                    needs = [("forward", s, k)] + ([] if last else [("backward", s + 1, k)])
                if any(need not in done for need in needs):
                    break
                begins = max([clocks[s], *(done[need] for need in needs)])
                clocks[s] = begins + (forward if action == "forward" else backward)
                assert (action, s, k) not in done
                done[action, s, k] = clocks[s]
                kept[s] += 1 if action == "forward" else -1
                most[s] = max(most[s], kept[s])
                next_[s] += 1
                moved = True
    assert len(done) == 2 * stages * micro_batches, "a deadlock"
    return max(clocks), most


@pytest.mark.parametrize("name", orders.ORDERS)
def test_every_size_ends_in_the_time_of_the_bubble(name):
    """(M + S - 1) (f + b) seconds where links take none, whatever f and b are."""
    for stages, micro_batches in SIZES:
        seconds, most = run(name, stages, micro_batches, forward=1.0, backward=2.0)
        assert seconds == 3.0 * (micro_batches + stages - 1), (stages, micro_batches)
        for s in range(stages):
            waits = name == "gpipe" and s < stages - 1
            bound = micro_batches if waits else min(stages - s, micro_batches)
            assert most[s] == bound, (stages, micro_batches, s)


@pytest.mark.parametrize(("last_costs", "speeds"), [(0, None), (1.5, None), (2, [1, 0.5, 2])])
def test_layers_are_divided_as_well_as_can_be(last_costs, speeds):
    def slowest(counts):
        costs = [*counts[:-1], counts[-1] + last_costs]
        return max(c / v for c, v in zip(costs, speeds or [1] * len(counts), strict=True))

    for layers in range(3, 12):
        every = [c for c in itertools.product(range(1, layers), repeat=3) if sum(c) == layers]
        got = orders.divide(layers, 3, last_costs, speeds)
        assert sum(got) == layers and slowest(got) == min(map(slowest, every))


@pytest.mark.parametrize("text", ["3,3", "a,2,4", "0,3,3", "1,2,2"])
def test_layers_that_do_not_fit_are_refused(text):
    assert orders.layers_of("1,2,3", 6, 3, 0.0) == [1, 2, 3]
    with refused("pipeline.layers", text):
        orders.layers_of(text, 6, 3, 0.0)


def test_more_stages_than_layers_are_refused():
    with refused("pipeline.stages", 4):
        orders.divide(3, 4)
