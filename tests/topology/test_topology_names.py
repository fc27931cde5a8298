"""Named schedules against the closed forms and tables of their papers."""

import itertools

import numpy as np
import pytest
from mixing import metropolis, norm
from refusals import refuses

from decent_jax.topology import make, metropolis_hastings


def hears(matrix):
    """Who hears whom, (n, n) bool, oneself left out."""
    return (matrix > 0) & ~np.eye(len(matrix), dtype=bool)


# --- exponential graphs ---------------------------------------------------------------------------

GAPS = {5: 0.75, 7: 0.646447, 9: 0.558213, 11: 0.510419, 13: 0.543657, 15: 0.510102}
GAPS |= {17: 0.452379, 33: 0.3922, 4: 2 / 3, 8: 1 / 2, 12: 2 / 5, 16: 2 / 5, 32: 1 / 3, 64: 2 / 7}


def test_gap_of_static_exp():
    """2 / (1 + ceil(log2 n)) for even n, more for odd n > 1, n = 2 to 65 (Ying et al. 2021)."""
    for n in range(2, 66):
        tau = int(np.ceil(np.log2(n)))
        schedule = make("static_exp", n)
        gap = schedule.spectral_gap()
        if n % 2:
            assert gap > 2 / (1 + tau) + 1e-9 or n == 3, n
        else:
            assert gap == pytest.approx(2 / (1 + tau), abs=1e-12), n
        assert schedule.degree(0) == len(schedule.rounds[0].sends) == tau
        if n in GAPS:
            assert gap == pytest.approx(GAPS[n], abs=5e-5 if n == 33 else 6e-7)
        # The eigenvalues of a circulant matrix are the Fourier transform of its first row.
        eigenvalues = np.abs(np.fft.fft(schedule.matrix(0)[0]))[1:]
        assert schedule.consensus_rate() == pytest.approx(eigenvalues.max(), abs=1e-9)
    assert make("static_exp", 3).exact_after() == 1


# --- Base-(k+1) -----------------------------------------------------------------------------------

# Rounds to the exact mean with a degree of at most 1, 2 and 4.
BASE_ROUNDS = {3: (3, 1, 1), 5: (5, 3, 1), 6: (4, 2, 2), 7: (5, 4, 3), 8: (3, 3, 2), 9: (7, 2, 2)}
BASE_ROUNDS |= {10: (6, 4, 2), 12: (5, 3, 2), 16: (4, 4, 2), 24: (6, 4, 3), 25: (9, 6, 2)}


@pytest.mark.parametrize("n", BASE_ROUNDS)
def test_rounds_of_base_k(n):
    got = tuple(make(f"base_k(max_degree={k})", n).exact_after() for k in (1, 2, 4))
    assert got == BASE_ROUNDS[n]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 98])
def test_base_k_is_exact(k):
    """After one period, to rounding; symmetric; nobody hears more than k."""
    for n in (*range(2, 33), 45, 64, 66, 81, 95, 97, 99):
        rounds, whole, before = make("base_k", n, max_degree=k).rounds, np.eye(n), np.eye(n)
        for rnd in rounds:
            whole, before = rnd.matrix @ whole, whole
            assert (rnd.matrix == rnd.matrix.T).all() and len(rnd.sends) <= k
            assert 0 < hears(rnd.matrix).sum(1).max() <= k
        assert np.abs(whole - 1 / n).max() < 1e-14, n
        assert np.linalg.norm(before - 1 / n) > 1e-3  # no round to spare
        # log_{k+1} n rounds are needed; Takezawa et al. promise 2 log_{k+1} n + 2.
        least = np.log(n) / np.log(k + 1)
        assert least - 1e-9 <= len(rounds) <= 2 * least + 2


def test_base_2_over_six():
    schedule = make("base_k", 6)
    pairs = [np.argwhere(np.triu(schedule.matrix(r), 1) > 0).tolist() for r in range(4)]
    assert pairs == [
        [[0, 1], [3, 4]],
        [[1, 2], [4, 5]],
        [[0, 1], [3, 4]],
        [[0, 3], [1, 4], [2, 5]],
    ]
    weights = [schedule.matrix(r)[tuple(pairs[r][0])] for r in range(4)]
    np.testing.assert_allclose(weights, [1 / 2, 2 / 3, 1 / 2, 1 / 2])
    np.testing.assert_allclose(np.diag(schedule.matrix(1)), [1, 1 / 3, 1 / 3] * 2)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_base_2_of_a_power_of_two_is_the_hypercube(n):
    ours, cube = make("base_k", n), make("hypercube", n)
    assert ours.period == cube.period
    for r in range(ours.period):
        np.testing.assert_array_equal(ours.matrix(r), cube.matrix(r))


# --- grids, tori, stars ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 16, 33])
def test_star(n):
    star = make("star", n)
    wanted = metropolis([(0, leaf) for leaf in range(1, n)], n)
    np.testing.assert_allclose(star.matrix(0), wanted, atol=1e-15)
    assert star.consensus_rate() == pytest.approx(1 - 1 / n if n > 2 else 0)


@pytest.mark.parametrize(("n", "rows"), [(9, 3), (12, 3), (16, 4), (25, 5), (20, 4), (24, 4)])
def test_rate_of_a_torus(n, rows):
    """Eigenvalues (1 + 2 cos(2 pi a / rows) + 2 cos(2 pi b / columns)) / 5, sides above 2."""
    schedule = make("torus", n)
    a = 2 * np.cos(2 * np.pi * np.arange(rows) / rows)
    b = 2 * np.cos(2 * np.pi * np.arange(n // rows) * rows / n)
    eigenvalues = np.sort(np.abs(1 + a[:, None] + b[None]).ravel() / 5)
    assert schedule.consensus_rate() == pytest.approx(eigenvalues[-2])
    assert schedule.degree(0) == 4


def lattice_edges(rows, columns, wraps):
    edges = set()
    for r, c in itertools.product(range(rows), range(columns)):
        for down, right in ((1, 0), (0, 1)):
            there = r + down, c + right
            if wraps:
                there = there[0] % rows, there[1] % columns
            if there[0] < rows and there[1] < columns and there != (r, c):
                edges.add(frozenset((r * columns + c, there[0] * columns + there[1])))
    return [tuple(edge) for edge in edges]


@pytest.mark.parametrize(
    ("n", "rows", "default"),
    [(2, 1, True), (5, 1, True), (6, 2, True), (8, 2, True), (8, 4, False), (12, 3, True)],
)
@pytest.mark.parametrize(("name", "wraps"), [("grid", False), ("torus", True)])
def test_lattices_edge_by_edge(name, wraps, n, rows, default):
    wanted = metropolis(lattice_edges(rows, n // rows, wraps), n)
    schedule = make(name, n) if default else make(name, n, rows=rows)
    np.testing.assert_allclose(schedule.matrix(0), wanted, atol=1e-15)


# --- random schedules -----------------------------------------------------------------------------

RANDOM = ["random_matching", "random_regular", "erdos_renyi", "equi_dynamic"]


@pytest.mark.parametrize("name", RANDOM)
def test_seeds(name):
    """The same seed is the same schedule; others differ; what is drawn never changes."""

    def matrices(seed):
        schedule = make(name, 9, seed=seed)
        return np.stack([one.matrix for one in schedule.rounds])

    assert (matrices(3) == matrices(3)).all()
    drawn = [matrices(seed) for seed in range(8)]
    assert len({one.tobytes() for one in drawn}) == 8
    np.testing.assert_array_equal(np.stack([m.matrix for m in make(name, 9).rounds]), drawn[0])


FIXED = {
    "equi_dynamic": [12, 8, 9, 13, 5, 11, 14, 2],
    "random_matching": [4, 6, 7, 5, 0, 3, 1, 2],
    "random_regular": [3, 4, 5, 7],
    "erdos_renyi": [2, 3, 4, 5, 6, 7, 8],
}


def test_drawn_schedules_stay_as_they_are():
    """Checkpoints are resumed with them, and processes must agree."""
    shifts = [int(one.sends[0].sources[0]) for one in make("equi_dynamic", 16, seed=1).rounds]
    assert shifts == FIXED["equi_dynamic"]
    matching = make("random_matching", 8, seed=1).rounds[0].sends[0].sources
    assert matching.tolist() == FIXED["random_matching"]
    for name in ("random_regular", "erdos_renyi"):
        neighbours = np.flatnonzero(hears(make(name, 10, seed=1).matrix(0))[0])
        assert neighbours.tolist() == FIXED[name]


@pytest.mark.parametrize("n", [3, 4, 7, 8, 16])
def test_random_matching_contracts_as_drawn(n):
    """Over many rounds, each a uniform perfect matching (one idle where n is odd)."""
    schedule = make("random_matching", n, rounds=4000, seed=5)
    factor = 1 / 2 if n % 2 else (n - 2) / (2 * (n - 1))
    gram = sum(one.matrix.T @ one.matrix for one in schedule.rounds) / schedule.period
    wanted = np.eye(n) * factor + (1 - factor) / n  # isotropic
    assert np.abs(gram - wanted).max() < 0.02
    assert all(hears(one.matrix).sum() == n - n % 2 for one in schedule.rounds)


@pytest.mark.parametrize("n", [3, 5, 8, 12, 17])
def test_equi_dynamic_over_all_shifts(n):
    """As many rounds as there are: each shift once."""
    schedule = make("equi_dynamic", n, rounds=n, seed=2)
    assert schedule.period == n - 1
    shifts = {int((0 - one.sends[0].sources[0]) % n) for one in schedule.rounds}
    assert shifts == set(range(1, n))


@pytest.mark.parametrize(
    ("n", "degree"), [(5, 2), (8, 3), (9, 4), (12, 6), (16, 5), (10, 8), (8, 7)]
)
def test_random_regular_graphs(n, degree):
    for seed in range(5):
        schedule = make("random_regular", n, degree=degree, seed=seed)
        graph = hears(schedule.matrix(0))
        assert (graph == graph.T).all() and (graph.sum(1) == degree).all()
        np.testing.assert_allclose(schedule.matrix(0)[graph], 1 / (degree + 1))
        np.testing.assert_allclose(np.diag(schedule.matrix(0)), 1 / (degree + 1))
        assert len(schedule.rounds[0].sends) == degree


def test_erdos_renyi_edges():
    """Each edge with the probability asked for; what is not connected is drawn again."""
    graphs = [
        hears(make("erdos_renyi", 20, probability=0.5, seed=seed).matrix(0)) for seed in range(100)
    ]
    assert np.mean(graphs) == pytest.approx(0.5 * 19 / 20, abs=0.02)
    assert all((graph == graph.T).all() for graph in graphs)
    default = [hears(make("erdos_renyi", 20, seed=seed).matrix(0)) for seed in range(100)]
    assert np.mean(default) == pytest.approx(2 * np.log(20) / 20 * 19 / 20, abs=0.02)
    everybody = make("erdos_renyi", 6, probability=1).matrix(0)
    np.testing.assert_allclose(everybody, np.full((6, 6), 1 / 6))
    graph = hears(make("erdos_renyi", 9, seed=4).matrix(0))
    np.testing.assert_allclose(make("erdos_renyi", 9, seed=4).matrix(0), metropolis_hastings(graph))


# --- nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "outer", "local", "nodes"),
    [
        ("complete", "one_peer_exp", 4, 4),
        ("complete", "one_peer_exp", 2, 5),
        ("complete", "complete", 3, 2),
        ("complete", "bidirectional_ring", 4, 5),
        ("one_peer_exp", "one_peer_exp", 4, 4),
        ("ring", "base_k", 4, 3),
        ("base_k(max_degree=2)", "complete", 3, 3),
        ("star", "random_matching(rounds=3)", 3, 4),
        ("static_exp", "one_peer_exp", 4, 1),
    ],
)
def test_hierarchical_is_the_kronecker_product(inner, outer, local, nodes):
    schedule = make(f"hierarchical({inner}, {outer})", local * nodes, replicas_per_node=local)
    inside, across = make(inner, local), make(outer, nodes)
    assert schedule.period == np.lcm(inside.period, across.period)
    for r in range(schedule.period):
        a, b = across.matrix(r % across.period), inside.matrix(r % inside.period)
        np.testing.assert_allclose(schedule.matrix(r), np.kron(a, b), atol=1e-16)
        if nodes > 1:
            assert norm(schedule.matrix(r)) == pytest.approx(max(norm(a), norm(b)), abs=1e-12)
    both = inside.exact_after(), across.exact_after()
    if None not in both:
        assert schedule.exact_after() == max(*both, 1)
    else:
        assert schedule.exact_after() is None


def test_hierarchical_is_few_messages():
    """A mean over the node and outer's sends, however many replicas a node holds."""
    schedule = make("hierarchical", 32, replicas_per_node=4)
    assert (schedule.period, schedule.partial_groups, schedule.exact_after()) == (3, True, 3)
    for one in schedule.rounds:
        assert one.group_size == 4 and len(one.sends) == 1
        assert (one.sends[0].sources % 4 == np.arange(32) % 4).all()
    whole = make("hierarchical(complete, complete)", 12, replicas_per_node=3).rounds[0]
    assert whole.group_size == 12 and not whole.sends
    # No group of consecutive replicas: (d_outer + 1)(d_inner + 1) - 1 messages.
    mixed = make("hierarchical(one_peer_exp, complete)", 12, replicas_per_node=3).rounds[0]
    assert mixed.group_size == 1 and len(mixed.sends) == 4 * 2 - 1
    pairs = make("hierarchical(base_k, one_peer_exp)", 6, replicas_per_node=3)
    assert [len(one.sends) for one in pairs.rounds] == [3, 3, 3]
    idle = pairs.rounds[0].sends  # replica 2 of a node idles in base_k's first round
    assert sorted((send.sources[2::3] >= 0).all() for send in idle) == [False, False, True]


# --- all of them ----------------------------------------------------------------------------------

# A name, replicas, replicas of a node, and words of the refusal.
REFUSED = """
exp | 8 | 1 | 'exp' complete one_peer_exp
ring | 0 | 1 | replica 0
complete | 4 | 0 | replicas_per_node 0
ring | 7 | 1 | ring 7 even one_peer_exp
hypercube | 6 | 1 | hypercube 6 one_peer_exp
alternating_exp_ring | 8 | 1 | 8 replicas_per_node 1
alternating_exp_ring | 12 | 2 | 12 replicas_per_node 2
alternating_exp_ring | 4 | 4 | 4 replicas_per_node
base_k(max_degree=0) | 8 | 1 | base_k 8 max_degree 0
grid(rows=0) | 6 | 1 | grid 6 rows 0
torus(rows=7) | 6 | 1 | torus 6 rows 7
random_matching(seed=-1) | 9 | 1 | random_matching 9 seed -1
equi_dynamic(seed=4294967296) | 9 | 1 | equi_dynamic 9 seed 4294967296
random_matching(rounds=0) | 8 | 1 | random_matching 8 rounds 0
random_matching(rounds=1) | 8 | 1 | 100 1 rounds
random_regular(degree=1) | 8 | 1 | degree 1
random_regular(degree=8) | 8 | 1 | degree 8 complete
random_regular(degree=3) | 9 | 1 | odd degree 3
erdos_renyi(probability=1.01) | 8 | 1 | probability 1.01
erdos_renyi(probability=0.01) | 30 | 1 | 100 probability 0.01
hierarchical | 8 | 1 | replicas_per_node 1
hierarchical | 8 | 3 | replicas_per_node 3
hierarchical | 2 | 4 | replicas_per_node 4
hierarchical(complete, ring) | 12 | 4 | 12 ring 3 even
hierarchical(hypercube, ring) | 12 | 6 | 12 hypercube 6
hierarchical(hierarchical, ring) | 8 | 2 | 8 hierarchical replicas_per_node 1
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_schedule_that_does_not_exist_is_refused(row):
    name, n, replicas_per_node, words = row.split(" | ")
    with refuses(*words.split()):
        make(name, int(n), replicas_per_node=int(replicas_per_node))


@pytest.mark.parametrize("n", [2.0, "4", None, True])
def test_the_number_of_replicas_is_a_whole_number(n):
    with refuses("num_replicas", repr(n)):
        make("ring", n)
