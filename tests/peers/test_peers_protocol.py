"""Pairwise averages: against the exact simulation, in every format, and with failures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles_seldom
import pytest
from interactions import interactions, swarm
from test_peers_law import exchange

from decent_jax import optim, topology
from decent_jax.peers import FORMATS
from decent_jax.peers.protocol import Averager, Format, sent_of

D = 37


def answer(answerer, offer, message):
    """The reply to a message that takes no time, or None: "not now"."""
    return answerer.answer(offer, message()) if answerer.agree(offer.name) else None


def average(asker, answerer):
    """A whole average; whether it was accepted."""
    messages = exchange(asker, answerer)
    while True:
        try:
            next(messages)
        except StopIteration as end:
            return end.value


def peers(x, form, clock=lambda: 0.0):
    group = [Averager(f"{k}.0", Format(form), 5.0, 1e9, clock) for k in range(len(x))]
    for one, row in zip(group, x, strict=True):
        one.update_members({other.me: ("127.0.0.1", 9) for other in group})
        one.publish([row.copy()], 0)
    return group


def add(x, k, averager):
    """The step boundary of peer k."""
    for average in averager.take():
        x[k] += average.pull[0]
    averager.publish([x[k].copy()], 0)


def outer(x0, **numbers):
    """The same with the pairwise update of `optim.noloco` with these numbers."""
    method = optim.METHODS["noloco"]
    pairwise = jax.jit(method.pairwise(method.numbers | numbers))
    alone = topology.make("random_matching", 1)
    tx = method.build(optim.Parts(alone, 0.0, optax.identity(), numbers=numbers))
    own = [tx.init(jnp.asarray(row)).own for row in x0]

    def boundary(x, k, averager):
        for average in averager.take():
            x[k], own[k] = pairwise(x[k], own[k], average.mine.arrays[0], average.pull[0])
        averager.publish([x[k].copy()], 0)

    return boundary


def replayed(form, sequence, x0, noise, add=add):
    """The models after a sequence of interactions with given local updates (float64)."""
    x = x0.copy()
    group = peers(x, form)
    came_about = 0
    for number, (i, j, *_) in enumerate(sequence):
        x[i] -= noise[number, 0]
        x[j] -= noise[number, 1]
        came_about += bool(average(group[i], group[j]))
        for k in (i, j):
            if not group[k].idle():
                add(x, k, group[k])
    return x, came_about


def updates(sequence, seed=0):
    return 0.01 * np.random.default_rng(seed).normal(size=(len(sequence), 2, D))


def test_it_is_the_simulated_recursion():
    sequence = interactions(5, 300, seed=3)
    x0 = np.random.default_rng(1).normal(size=(5, D))
    noise = updates(sequence)
    turn = {i: iter([]) for i in range(5)}
    for i in range(5):
        own = [noise[t, (a, b).index(i)] for t, (a, b, *_) in enumerate(sequence) if i in (a, b)]
        turn[i] = iter(own)
    wanted, _ = swarm(x0, sequence, lambda i, x, k: next(turn[i]), 1.0, blocking=False)
    x, came_about = replayed("float32", sequence, x0, noise)
    assert came_about == 300
    np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FORMATS)
def test_the_seed_of_a_run_decides_what_its_copies_are_rounded_by(name):
    copy = [np.linspace(0, 1, 200, dtype=np.float32)]
    first, again, other = (sent_of(Format(name, s), "1.0", 2, copy, 0.01) for s in (3, 3, 2**40))
    np.testing.assert_array_equal(first, again)
    assert (first[0] != other[0]).any() == (name == "int8")


@pytest.mark.usefixtures("x64")
def test_outer_steps_are_the_recursion():
    sequence = interactions(3, 40, seed=4)
    x0 = np.random.default_rng(1).normal(size=(3, D))
    noise = updates(sequence)
    numbers = {"learning_rate": 0.6, "momentum": 0.4}
    x, came_about = replayed("float32", sequence, x0, noise, outer(x0, **numbers))
    pairs = [(i, j) for i, j, *_ in sequence]
    wanted = oracles_seldom.noloco_of_peers(x0, pairs, -noise, 0.6, 0.4)
    assert came_about == 40
    np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["float32", "lattice8"])
def test_outer_steps_without_momentum_are_swarm(form):
    """At a rate of 1, and whatever the messages lose."""
    sequence = interactions(3, 40, seed=4)
    x0 = np.tile(0.2 * np.random.default_rng(2).normal(size=D), (3, 1))
    noise = updates(sequence)
    plain = outer(x0, learning_rate=1.0, momentum=0.0)
    x, came_about = replayed(form, sequence, x0, noise, plain)
    wanted, also = replayed(form, sequence, x0, noise)
    assert came_about == also > 20
    np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_keeps_the_mean_and_its_peers_together(form):
    n = 6
    sequence = interactions(n, 400, seed=5)
    x0 = np.tile(0.2 * np.random.default_rng(2).normal(size=D), (n, 1))
    noise = updates(sequence)
    x, came_about = replayed(form, sequence, x0, noise)
    moved = x.mean(axis=0) - x0.mean(axis=0) + noise.sum(axis=(0, 1)) / n
    assert np.abs(moved).max() < 1e-13
    exact = replayed("float32", sequence, x0, noise)[0]
    spread, wanted = (np.square(y - y.mean(axis=0)).sum() for y in (x, exact))
    assert 0.8 * wanted < spread < 1.3 * wanted
    assert 320 < came_about <= 400


def test_a_message_that_one_side_does_not_understand_moves_neither():
    one, other = peers(np.array([np.zeros(D), np.full(D, 50.0)]), "lattice8")
    assert average(one, other) is False
    assert one.take() == other.take() == [] and one.idle() and other.idle()
    assert one.counts["undecoded"] == other.counts["undecoded"] == 1
    tries = 0
    while not average(one, other):
        tries += 1
    assert tries < 15 and one.take() and other.take()


def test_numbers_that_are_not_finite_do_not_spread():
    one, other = peers(np.array([np.full(D, np.nan), np.zeros(D)]), "float32")
    assert average(one, other) is False and average(other, one) is False
    assert one.take() == other.take() == []


def test_the_distance_is_that_of_the_two_copies():
    x = np.random.default_rng(0).normal(size=(2, D))
    one, other = peers(x, "float32")
    assert average(one, other)
    apart = np.linalg.norm(x[1] - x[0])
    assert one.distance == pytest.approx(apart / np.linalg.norm(x[0]))
    assert other.distance == pytest.approx(apart / np.linalg.norm(x[1]))


def test_one_meeting_at_a_time():
    one, other, third = peers(np.zeros((3, D)), "float32")
    offer, message = one.ask()
    one.give_up("0.0-7", "lost")  # another one, of which it hears late
    assert one.ask() is None and not one.idle() and not one.counts["lost"]
    assert answer(one, *third.ask()) is None  # "not now"
    reply = answer(other, offer, message)
    assert other.ask() is None
    one.close(offer.name, other.settle(offer.name, one.receive(*reply)))
    assert one.ask() is None and other.ask() is None  # until the step boundary
    one.take()
    assert one.ask() is None  # until it has published again
    one.publish([np.zeros(D)], 7)
    assert one.ask()[0].version == 1


def test_an_asker_that_comes_too_late_averages_no_more_than_its_partner():
    now = [0.0]
    one, other = peers(np.array([np.zeros(D), np.ones(D)]), "float32", lambda: now[0])
    offer, message = one.ask()
    decoded = one.receive(*answer(other, offer, message))
    now[0] = 6.0  # past the patience of 5 s
    assert other.idle() and other.counts["lost"] == 1
    assert other.settle(offer.name, decoded) is False
    one.close(offer.name, False)
    assert one.take() == other.take() == []
    assert one.counts["lost"] == 1 and not one.counts["undecoded"]


def test_a_question_that_cannot_be_encoded_leaves_no_meeting_under_way():
    (one,) = peers(np.full((1, D), np.inf), "lattice8")
    _, message = one.ask()
    with pytest.raises(ValueError):
        message()
    assert one.idle()


def test_who_ends_finishes_what_is_under_way_and_begins_nothing():
    one, other = peers(np.array([np.zeros(D), np.ones(D)]), "float32")
    offer, message = one.ask()
    one.closed = True
    assert not one.idle()
    one.close(offer.name, other.settle(offer.name, one.receive(*answer(other, offer, message))))
    assert not one.idle() and one.take() and one.idle()
    one.publish([np.zeros(D)], 0)
    assert one.ask() is None and answer(one, *peers(np.zeros((1, D)), "float32")[0].ask()) is None
