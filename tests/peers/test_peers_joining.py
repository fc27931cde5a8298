"""Who may train with which parameters, for all orders of joining, dying, silence and lateness.

The peers are real ones without threads, sockets or a model: `Membership`, `state_to_join`,
`Reporter` and `Averager` decide. Parameters are weights: of the run's own state (entry 0), and of
states that nobody else may use (an entry each): the first parameters of a peer that joins or is
late, and what a peer has that was suspended for long while the others trained.
"""

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_peers_law import exchange

from decent_jax.peers import Peers
from decent_jax.peers.membership import Membership, Reporter, state_to_join
from decent_jax.peers.peer_run import CommonProgress
from decent_jax.peers.protocol import Averager, Format, JoinState
from decent_jax.peers.step_boundary import NotJoined

N, RANKS, ENTRIES = 2, 4, 400
PEERS = Peers(silent_s=5.0, max_lag=4, start_s=1e9, exchange_s=1e9)


class Later(Exception):
    """A peer has to wait before it may train."""


class Simulated:
    """A peer of a `World`."""

    def __init__(self, world, rank, generation, fresh):
        name, config = f"{rank}.{generation}", SimpleNamespace(peers=PEERS)
        self.world, self.name, self.fresh = world, name, fresh
        self.place = SimpleNamespace(config=config, rank=rank, generation=generation, name=name)
        self.averager = Averager(
            name, Format("float32"), PEERS.exchange_s, PEERS.silent_s, lambda: world.now
        )
        self.common = CommonProgress(N, 10**9)
        self.boundary = SimpleNamespace(
            averager=self.averager, alone=False, losses=(0.0, 0), stale=0
        )
        given = self.place, ("", rank), self, self.boundary, self.common, self.leave
        self.reporter = Reporter(*given)
        self.how, self.suspended, self.is_cut, self.was_cut, self.trains = None, None, False, 0, 0
        self.compiled = world.now + world.random.choice([0, 0, 3, 30])
        self.steps = self.common.own = world.known(rank)
        self.since = world.steps()
        self.x = np.zeros(ENTRIES, np.float32)
        self.x[0 if fresh is not None else world.entry()] = 1.0

    def call(self, method, *args):
        """In place of the connection to the membership."""
        if self.is_cut:
            self.was_cut = True
            raise TimeoutError
        answer = getattr(self.world.membership, method)(*args)
        self.was_cut = self.was_cut and method != "beat"
        return answer

    def leave(self, how):
        self.how = how

    def spoil(self):
        """Nobody may use its parameters from now on."""
        self.x[self.world.entry()] = 1.0
        if self.trains and self.averager.snapshot is not None:
            self.averager.snapshot.arrays[0][:] = self.x

    # --- What it does on its own ------------------------------------------------------------------

    def begin(self):
        world = self.world
        if self.trains or self.is_cut or self.world.now < self.compiled:
            return
        is_late = self.fresh is not None and world.steps() - self.since > N * self.fresh
        if is_late and not self.is_alone():
            self.spoil()

        def ask(address, *_):
            donor = world.peers[address[1]]
            if donor.suspended is not None and world.random.random() < 0.5:
                world.pass_without(donor, self)
            if donor.suspended is not None or not (donor.trains and donor.is_there()):
                raise EOFError
            return JoinState(donor.name, 0, [donor.x.copy()])

        def wait(_):
            raise Later

        try:
            found = state_to_join(self.place, self, b"", ask=ask, clock=lambda: 0.0, wait=wait)
        except (Later, TimeoutError):
            return
        self.x = self.x if found is None else found.arrays[0]
        assert found is not None or self.fresh is not None, f"{self.name} is a group alone"
        self.trains = True
        self.averager.publish([self.x.copy()], 0)

    def step(self):
        if not self.trains:
            return
        taken = self.averager.take()
        for average in taken:
            self.x = self.x + average.pull[0]
        if taken or self.averager.snapshot is None:
            self.averager.publish([self.x.copy()], 0)
        self.steps += self.world.random.choice([1, 2])
        self.common.own = self.steps

    def report(self):
        if self.trains:
            alone = self.is_alone()
            self.reporter.beat()
            if alone:  # what it has is the run's now
                self.world.own |= set(np.flatnonzero(self.x))

    def ask(self):
        names = [name for name in self.averager.members if name != self.name]
        if self.trains and names:
            name = self.world.random.choice(names)
            for other in self.world.peers.values():
                if other.name == name:
                    self.world.exchanges.append(
                        (self, other, exchange(self.averager, other.averager))
                    )

    def is_there(self):
        return self.how is None

    def is_alone(self):
        """Whether nobody else trains, as far as `train.py` knows."""
        status = self.world.membership.status()
        others = [peer for rank, peer in self.world.peers.items() if status[rank]["alive"]]
        return not any(peer.trains and peer.how != "lag" and peer is not self for peer in others)


class World:
    """Peers that train for a while, and what happens to them."""

    def __init__(self, seed, count, is_resumed):
        self.random = random.Random(seed)
        self.now, self.entries, self.exchanges, self.peers = 0.0, 0, [], {}
        self.own = {0}  # entries of states that all may use
        self.membership = Membership(PEERS, N, {}, lambda: self.now)
        for rank in range(count):
            self.start(rank, PEERS.max_lag if is_resumed else 0)

    def entry(self):
        self.entries += 1
        return self.entries

    def known(self, rank):
        return self.membership.status().get(rank, {"steps": 0})["steps"]

    def steps(self):
        return sum(status["steps"] for status in self.membership.status().values())

    def start(self, rank, fresh=None):
        """As `Supervisor` does."""
        generation = self.peers[rank].place.generation + 1 if rank in self.peers else 0
        self.membership.add(rank, generation, fresh)
        self.peers[rank] = Simulated(self, rank, generation, fresh)

    def second(self, without=()):
        """Everybody does something, in any order."""
        self.now += 1.0
        here = [p for p in self.peers.values() if p.is_there() and p.suspended is None]
        acts = [(p, act) for p in here for act in ("begin", "step", "report", "ask", "report")]
        self.random.shuffle(acts)
        for peer, act in acts:
            if peer not in without and peer.is_there() and self.random.random() < 0.8:
                getattr(peer, act)()
            self.messages()
            self.check()

    def messages(self):
        under_way, self.exchanges = self.exchanges, []
        for asker, answerer, messages in under_way:
            waits = asker.suspended is not None or answerer.suspended is not None
            if not asker.is_there() or not answerer.is_there():  # the connection breaks
                if asker.is_there() and asker.trains:
                    asker.averager.withdraw()
            elif waits or self.random.random() < 0.5 or next(messages, self) is not self:
                self.exchanges.append((asker, answerer, messages))

    def happens(self):
        """Faults, and what is done about them."""
        for rank in range(RANKS):
            peer, drawn = self.peers.get(rank), self.random.random()
            if peer is None or not peer.is_there():
                if drawn < 0.3:  # it is replaced, or the run is resized
                    if peer is not None:
                        self.membership.remove(rank)
                    if self.membership.is_hopeful():
                        self.start(rank)
            elif peer.suspended is not None:
                if drawn < 0.1:
                    self.goes_on(peer)
            elif drawn < 0.03:
                peer.suspended = self.now, self.steps()
            elif drawn < 0.05:
                peer.how = "killed"
            elif drawn < 0.15:
                peer.is_cut = drawn < 0.07

    def goes_on(self, peer):
        if peer.suspended is None:
            return
        (then, steps), peer.suspended = peer.suspended, None
        long = self.now - then > PEERS.silent_s and self.steps() - steps > N * PEERS.max_lag
        if (
            long and peer.trains and not peer.was_cut
        ):  # one that was cut off may seem to have kept up
            peer.spoil()

    def pass_without(self, suspended, joins):
        """A request waits for a suspended peer; it goes on at last, perhaps."""
        for _ in range(self.random.choice([1, 20])):
            self.second(without=(joins,))
        self.goes_on(suspended)

    def check(self):
        there = [peer for peer in self.peers.values() if peer.trains and peer.is_there()]
        used = np.count_nonzero([peer.x for peer in there] or np.zeros((1, 1)), axis=0)
        given = set(np.flatnonzero(used > 1)) - self.own
        assert not given, f"of {[peer.name for peer in there]} two have what one may not give"


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), count=st.integers(1, RANKS), is_resumed=st.booleans())
def test_nobody_uses_parameters_from_outside_the_run(seed, count, is_resumed):
    world = World(seed, count, is_resumed)
    for _ in range(60):
        world.happens()
        world.second()


# --- The rule, case by case -----------------------------------------------------------------------

NOWHERE, REPORT = ("127.0.0.1", 9), {"steps": 7, "averaged": 0, "averaged_unanswered": 0}


def members(*ranks, clock=lambda: 0.0):
    """A membership of peers that train and have made 7 steps each."""
    membership = Membership(PEERS, N, {}, clock)
    for rank in ranks:
        membership.add(rank, 0, 0)
        assert membership.admits(rank, 0, None)
    for rank in ranks:
        assert not isinstance(membership.beat(rank, 0, NOWHERE, REPORT), str)
    return membership


def begins(membership, rank=1, **more):
    """The donor of a peer's first state, None for its own; nobody gives one unless ``ask`` does."""
    config = SimpleNamespace(peers=dataclasses.replace(PEERS, start_s=30.0, exchange_s=10.0))
    place = SimpleNamespace(config=config, rank=rank, generation=0, name=f"{rank}.0")
    near = SimpleNamespace(call=lambda method, *args: getattr(membership, method)(*args))
    given = {"ask": lambda *_: None, "wait": lambda _: pytest.fail("it must not wait")} | more
    found = state_to_join(place, near, b"", **given)
    return found and found.donor


def test_all_begin_with_the_same_state_until_somebody_has_made_a_step():
    membership = Membership(PEERS, N, {})
    for rank in range(3):
        membership.add(rank, 0, 0)
    assert begins(membership, 0) is begins(membership, 1) is None
    membership.beat(0, 0, NOWHERE, REPORT)
    assert begins(membership, 2, ask=lambda *_: JoinState("0.0", 7, [])) == "0.0"


@pytest.mark.parametrize(("seconds", "why"), [(0, "(EOFError)"), (60, "6 times peers.exchange_s")])
def test_a_state_that_does_not_arrive_says_whether_it_was_too_slow(seconds, why, capsys):
    membership, now = members(0), [0.0]
    membership.add(1, 0, None)

    def ask(*_):
        now[0] += seconds
        raise EOFError

    with pytest.raises(NotJoined):
        begins(membership, 1, ask=ask, clock=lambda: now[0], leaving=lambda: "leave")
    assert f"peer 0.0 sends no state {'within ' * bool(seconds)}{why}" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "donor"), [(8, None), (9, "0.0")])
def test_a_checkpoint_is_fresh_for_max_lag(steps, donor):
    """``steps`` of two replicas; others resume and compile faster."""
    membership = Membership(PEERS, N, {0: 10, 1: 5})
    membership.add(0, 0, PEERS.max_lag)
    membership.add(1, 0, PEERS.max_lag)
    assert begins(membership, 0) is None
    membership.beat(0, 0, NOWHERE, {"steps": 10 + steps, "averaged_unanswered": 0})
    assert begins(membership, 1, ask=lambda *_: JoinState("0.0", 7, [])) == donor


def test_a_peer_that_joins_waits_for_one_that_trains():
    """At the start of a resumed run the others restore and compile, perhaps for longer than it."""
    membership, waits = Membership(PEERS, N, {}), []
    membership.add(0, 0, 9)
    membership.add(1, 0, None)

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            membership.admits(0, 0, None)
            membership.beat(0, 0, NOWHERE, REPORT)

    assert begins(membership, wait=wait, ask=lambda *_: JoinState("0.0", 7, [])) == "0.0"
    assert len(waits) == 3


@pytest.mark.parametrize("others", [(), (0,)])
def test_a_peer_that_joins_never_trains_without_a_state(others):
    """It waits for one no longer than it may; of two that were killed at once, both wait."""
    membership, now = members(*others), [0.0]
    membership.add(1, 0, None)
    membership.add(2, 0, None)
    assert membership.is_hopeful() is bool(others)

    def wait(_):
        now[0] += 10.0

    with pytest.raises(NotJoined):
        begins(membership, clock=lambda: now[0], wait=wait)
    assert now[0] == 30.0
    with pytest.raises(NotJoined):
        begins(membership, leaving=lambda: "stop")


def test_who_gives_no_state_is_passed_over():
    membership = members(0, 2)
    membership.add(1, 0, None)
    asked = []

    def ask(address, secret, seconds):
        asked.append(address)
        if len(asked) == 1:
            raise EOFError
        return JoinState("2.0", 7, [])

    assert begins(membership, ask=ask) == "2.0" and len(asked) == 2


@pytest.mark.parametrize(
    ("seconds", "others", "own", "averages", "ends"),
    [
        (6, 13, 0, 0, True),  # suspended
        (4, 13, 0, 0, False),  # not for long
        (6, 8, 0, 0, False),  # nor did it miss much
        (6, 13, 5, 3, False),  # train.py was silent, this peer was not
        (6, 13, 5, 0, True),  # trained on alone
        (6, 13, 1, 1, True),  # suspended right after an average
    ],
)
def test_a_peer_that_was_silent_for_too_long_must_end(seconds, others, own, averages, ends):
    """What it knows is old, unless it kept up: its next average would pull the others back."""
    now = [0.0]
    membership = members(0, 1, clock=lambda: now[0])
    now[0] += seconds
    membership.beat(0, 0, NOWHERE, REPORT | {"steps": 7 + others})
    report = {"steps": 7 + own, "averaged_unanswered": averages}
    assert (membership.beat(1, 0, NOWHERE, report) == "lag") is ends
    assert [name for name, _ in membership.members()] == ["0.0"] + ["1.0"] * (not ends)
