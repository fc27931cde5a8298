"""Loops that agree at which boundary they stop or save: threads here, processes elsewhere."""

import random
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from decent_jax.cluster import agreement
from decent_jax.cluster.agreement import Agreement


class Store:
    """jax's key-value store, as far as it is used."""

    def __init__(self):
        self.pairs, self.sets = {}, 0

    def key_value_set(self, key, value):
        if key in self.pairs:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
        self.pairs[key] = value
        self.sets += 1

    def key_value_dir_get(self, folder):
        return sorted((key, value) for key, value in self.pairs.items() if key.startswith(folder))


def run(monkeypatch, count, steps, wishes, ahead=1, seed=0):
    """What each of ``count`` loops does: [(boundary, saves, stops), ...], and the store.

    Args:
      wishes: {(loop, boundary): (saves, stops)}, what a loop wants from there on, until it has it.
      ahead: boundaries that a loop may be before the slowest; more than that waits, as in an
        exchange.
    """
    store, drawn = Store(), random.Random(seed)
    passed, moved, found = [0] * count, threading.Condition(), [[] for _ in range(count)]
    monkeypatch.setattr(agreement, "_loops", iter([0] * count))
    monkeypatch.setattr(agreement, "_TICK_S", 0.01)
    made = []
    for own in range(count):
        state = SimpleNamespace(client=store, process_id=own, num_processes=count)
        monkeypatch.setattr(agreement, "global_state", state)
        made.append(Agreement())

    def loop(own, pauses):
        wish = False, False
        with made[own] as together:
            for boundary in range(1, steps + 1):
                with moved:
                    assert moved.wait_for(lambda b=boundary: min(passed) >= b - 1 - ahead, 60)
                time.sleep(pauses[boundary - 1])
                wish = wishes.get((own, boundary), wish)
                done = together.at_boundary(*wish)
                if any(done):
                    found[own].append((boundary, *done))
                    wish = False, wish[1] and not done[1]
                with moved:
                    passed[own] = steps if done[1] else boundary
                    moved.notify_all()
                if done[1]:
                    break

    pauses = [[drawn.choice([0, 0, 0.004, 0.02]) for _ in range(steps)] for _ in range(count)]
    threads = [
        threading.Thread(target=loop, args=(k, pauses[k]), daemon=True) for k in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the loops wait for each other"
    return found, store


@pytest.mark.parametrize(("ahead", "seed"), [(0, 0), (0, 2), (1, 1), (1, 3), (7, 0), (7, 2)])
def test_all_stop_at_the_same_boundary_soon_after_one_wants_to(monkeypatch, ahead, seed):
    at = random.Random(seed).randrange(1, 20)
    found, _ = run(monkeypatch, 3, 400, {(seed % 3, at): (False, True)}, ahead, seed)
    assert found[0] == found[1] == found[2]
    ((boundary, saves, stops),) = found[0]
    assert at < boundary < 400 and not saves and stops


def test_they_save_once_for_each_wish_and_stop_for_two_signals(monkeypatch):
    wishes = {(0, 5): (True, False), (1, 6): (True, False), (2, 120): (True, False)}
    wishes |= {(0, 250): (False, True), (2, 251): (False, True)}
    found, _ = run(monkeypatch, 3, 2000, wishes)
    assert found[0] == found[1] == found[2]
    assert [each[1:] for each in found[0]][-1] == (False, True) and 3 <= len(found[0]) <= 4
    assert all(saves for _, saves, _ in found[0][:-1])


def test_loops_that_want_nothing_tell_nothing_before_they_end(monkeypatch):
    found, store = run(monkeypatch, 2, 60, {})
    assert found == [[], []] and store.sets == 4


@pytest.mark.parametrize("boundary", [57, 58, 59, 60])
def test_a_wish_at_the_end_holds_nobody_up(monkeypatch, boundary):
    for seed in range(2):
        found, _ = run(monkeypatch, 3, 60, {(1, boundary): (False, True)}, seed=seed)
        assert found[0] == found[1] == found[2]


def test_one_process_agrees_with_itself():
    with Agreement() as together:
        assert together.at_boundary(True, False) == (True, False)
        assert together.at_boundary(False, True) == (False, True)
