"""What a schedule says of itself, figures, schedules from graphs and from matrices of one's own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing import norm, product, rebuild
from refusals import refuses

from decent_jax.plots.rounds import draw
from decent_jax.topology import NAMES, Schedule, make, metropolis_hastings
from decent_jax.topology.rounds import round_of

# --- exact consensus ------------------------------------------------------------------------------


def de_bruijn(k):
    """i sends half of its model to 2 i and half to 2 i + 1: a static graph that becomes exact."""
    n = 2**k
    matrix = np.zeros((n, n))
    for i in range(n):
        matrix[[2 * i % n, (2 * i + 1) % n], i] += 0.5
    return matrix


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_powers_of_a_round_may_be_exact(k):
    schedule = Schedule.from_matrices([de_bruijn(k)])
    assert schedule.exact_after() == k and schedule.consensus_rate() == 0
    assert schedule.spectral_gap() == pytest.approx(1 if k == 1 else 0, abs=1e-12)


def test_exact_from_another_phase():
    ring = make("alternating_exp_ring", 16, replicas_per_node=4)
    assert ring.exact_after() == 4
    later = Schedule("later", 16, ring.rounds[1:] + ring.rounds[:1])
    assert later.exact_after() == 5
    assert norm(product(later, range(4))) == pytest.approx(0.5)
    assert later.consensus_rate() == 0


def test_close_is_not_exact():
    """64 random matchings are 1e-12 away after a period; halves never make sixths."""
    for n, name in (8, "ring"), (9, "static_exp"), (3, "star"), (6, "random_matching(rounds=64)"):
        assert make(name, n).exact_after() is None


# --- summaries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_summary_of_every_schedule(name):
    for n in (1, 8):
        schedule = make(name, n, replicas_per_node=4)
        numbers = schedule.summary(10)
        assert numbers["bytes_sent"] == 10 * numbers["models_sent"] == schedule.bytes_sent(10)
        assert numbers["degree"] == max(schedule.degree(r) for r in range(schedule.period))
        exact = numbers["exact_after"]
        assert (exact is not None) == (numbers["consensus_rate"] == 0)
        if exact is not None:
            rounds = [r % schedule.period for r in range(exact)]
            assert norm(product(schedule, rounds)) < 1e-12
            assert exact == 0 or norm(product(schedule, rounds[:-1])) > 1e-3


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "rounds"), [("static_exp", 1, 1), ("base_k", 25, 9), ("hierarchical", 8, 1)]
)
def test_plot(name, n, rounds):
    figure = draw(make(name, n, replicas_per_node=4))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title for title in titles if title] == [f"round {r}" for r in range(rounds)]
    images = [axes.images[0] for axes in figure.axes if axes.images]
    schedule = make(name, n, replicas_per_node=4)
    for r in range(rounds):
        np.testing.assert_array_equal(images[r].get_array(), schedule.matrix(r))
    assert figure.get_suptitle().startswith(f"{name}\n{n} replicas, {rounds} round")
    figure.canvas.draw()


def test_plot_of_many_rounds_says_what_it_leaves_out():
    figure = draw(make("random_matching(rounds=20)", 6))
    assert figure.get_suptitle().endswith("20 rounds, of which the first 12")
    assert sum(bool(axes.images) for axes in figure.axes) == 12


def test_arrows_point_to_the_receiver():
    """Directed edges are arrows, equal weights both ways a line."""
    figure = draw(Schedule.from_matrices([de_bruijn(2) / 2 + np.eye(4) / 2]))
    axes = figure.axes[0]
    circle = [(np.sin(np.pi / 2 * i), np.cos(np.pi / 2 * i)) for i in range(4)]

    def replica(point):
        return int(np.argmin(np.linalg.norm(np.array(circle) - point, axis=1)))

    arrows = {tuple(map(replica, patch._posA_posB)) for patch in axes.patches}
    assert arrows == {(0, 1), (1, 3), (3, 2), (2, 0)}  # sender, receiver
    lines = {
        frozenset(map(replica, segment))
        for collection in axes.collections
        if hasattr(collection, "get_segments")
        for segment in collection.get_segments()
    }
    assert lines == {frozenset((1, 2))}


# --- weights and graphs ---------------------------------------------------------------------------


def test_metropolis_hastings_needs_symmetry():
    graph = np.zeros((3, 3), bool)
    graph[0, 1] = graph[1, 0] = graph[2, 1] = True
    with refuses("metropolis_hastings", 2, 1):
        metropolis_hastings(graph)


def test_undirected_graphs():
    nx = pytest.importorskip("networkx")
    petersen = Schedule.from_networkx(nx.petersen_graph())
    graph = nx.to_numpy_array(nx.petersen_graph())
    np.testing.assert_allclose(petersen.matrix(0), (graph + np.eye(10)) / 4)
    assert petersen.consensus_rate() == pytest.approx(0.5)  # eigenvalues 3, 1, -2 of the graph
    assert (petersen.name, petersen.degree(0)) == ("Petersen Graph", 3)
    named = nx.Graph([("hub", "a"), ("hub", "b"), ("hub", "c")])
    star = Schedule.from_networkx(named, name="wheel")
    np.testing.assert_allclose(star.matrix(0), make("star", 4).matrix(0))
    assert star.name == "wheel"
    multi = nx.MultiGraph([(0, 1), (0, 1), (1, 2), (2, 2)])
    line = Schedule.from_networkx(multi)
    np.testing.assert_allclose(line.matrix(0), make("grid(rows=1)", 3).matrix(0))
    assert line.name == "networkx"
    assert Schedule.from_networkx(nx.empty_graph(1)).num_replicas == 1
    grid = Schedule.from_networkx(nx.grid_2d_graph(3, 4))
    np.testing.assert_allclose(grid.matrix(0), make("grid", 12).matrix(0))


def test_graphs_that_are_refused():
    nx = pytest.importorskip("networkx")
    with refuses("none"):
        Schedule.from_networkx(nx.empty_graph(0))
    with refuses("[0]", "[1]"):
        Schedule.from_networkx(nx.empty_graph(2))
    with refuses("undirected"):
        Schedule.from_networkx(nx.DiGraph([(0, 1), (1, 0)]))


# --- matrices of one's own ------------------------------------------------------------------------

quick = settings(database=None, deadline=None, max_examples=60)


@st.composite
def permutation_mixtures(draw):
    """A doubly stochastic matrix: a convex combination of permutations (Birkhoff)."""
    n = draw(st.integers(2, 9))
    count = draw(st.integers(1, 4))
    parts = [draw(st.permutations(range(n))) for _ in range(count)]
    weights = np.array([draw(st.integers(1, 8)) for _ in range(count)], float)
    matrix = np.zeros((n, n))
    for weight, permutation in zip(weights / weights.sum(), parts, strict=True):
        matrix[np.arange(n), list(permutation)] += weight
    return matrix


def check_sends(matrix):
    one = round_of(matrix)
    np.testing.assert_array_equal(rebuild(one), matrix)
    for send in one.sends:
        heard = send.sources[send.sources >= 0]
        assert len(set(heard.tolist())) == len(heard)
        assert (send.sources != np.arange(len(matrix))).all()
        assert not send.weights[send.sources < 0].any()
    arrows = matrix - np.diag(np.diag(matrix)) > 0
    assert len(one.sends) == max(arrows.sum(0).max(), arrows.sum(1).max())


@given(st.integers(1, 8), st.data())
@quick
def test_sends_rebuild_any_matrix(n, data):
    numbers = st.lists(st.integers(0, 3), min_size=n * n, max_size=n * n)
    matrix = np.array(data.draw(numbers), float).reshape(n, n) + np.eye(n)
    check_sends(matrix / matrix.sum(1, keepdims=True))


@given(permutation_mixtures())
@quick
def test_from_matrices_accepts_or_says_why(matrix):
    """Half on oneself rules periodicity out, so exactly the disconnected ones are refused."""
    lazy = (matrix + np.eye(len(matrix))) / 2
    reach = np.linalg.matrix_power(lazy, len(lazy)) > 0
    if reach.all():
        schedule = Schedule.from_matrices([lazy, lazy])
        assert schedule.consensus_rate() < 1
        assert schedule.period == 2 and schedule.num_replicas == len(lazy)
    else:
        with refuses("consensus"):
            Schedule.from_matrices([lazy, lazy])


def test_rounds_may_leave_replicas_idle_if_the_period_connects_them():
    first, second = np.eye(3), np.eye(3)
    first[:2, :2] = second[1:, 1:] = 0.5
    schedule = Schedule.from_matrices([first, second])
    assert [schedule.degree(r) for r in range(2)] == [1, 1]
    assert not schedule.matrix(0).flags.writeable
    assert schedule.rounds[0].sends[0].sources.tolist() == [1, 0, -1]
    assert norm(schedule.period_matrix()) == pytest.approx(0.5)


HALF = np.full((2, 2), 0.5)


@pytest.mark.parametrize(
    ("matrices", "options", "message"),
    [
        ([], {}, "none"),
        ([np.ones((2, 3)) / 3], {}, "round 0 (2, 3) 2"),
        ([np.ones(3)], {}, "(3,)"),
        ([np.ones((0, 0))], {}, "(0, 0)"),
        ([HALF, np.eye(3)], {}, "round 1: (3, 3)"),
        ([HALF, [[1.5, -0.5], [-0.5, 1.5]]], {}, "round 1: -0.5"),
        ([[[np.nan, 1.0], [1.0, 0.0]]], {}, "round 0: nan"),
        ([HALF, HALF + 0j], {}, "round 1: complex128"),
        ([[["a", "b"], ["b", "a"]]], {}, "round 0: real"),
        ([[[0.5, 0.5], [1.0]]], {}, "round 0: real"),
        ([HALF, [[0.5, 0.5], [0.5, 0.4]]], {}, "round 1: row 1 0.9"),
        ([[[0.5, 0.5], [0.5, 0.5 + 1e-8]]], {}, "round 0: row 1 1.00000001"),
        ([[[1.0, 0.0], [0.5, 0.5]]], {}, "round 0: column 0 1.5"),
        ([np.eye(2)], {}, "'custom' [0] [1]"),
        ([np.kron(np.eye(2), HALF)], {"name": "two"}, "'two' [0, 1] [2, 3]"),
        ([[[0.0, 1.0], [1.0, 0.0]]], {}, "'custom' consensus"),
    ],
)
def test_from_matrices_refuses(matrices, options, message):
    with refuses(*message.split()):
        Schedule.from_matrices(matrices, **options)


def test_sums_may_be_off_by_rounding():
    Schedule.from_matrices([[[0.5, 0.5], [0.5, 0.5 + 5e-10]]])


def test_a_weight_that_rounding_left_below_0_is_0():
    given = np.kron(np.eye(2), HALF)
    given[0, 3] = -2e-16
    rnd, _ = Schedule.from_matrices([given, np.roll(given, (1, 1), (0, 1))]).rounds
    assert rnd.matrix.min() == 0 and rnd.degree == 1 and given[0, 3] < 0
