"""Names with parameters: how they are read, and what is said of those that cannot be."""

import keyword

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refuses

from decent_jax.topology import make
from decent_jax.topology.spec import Spec, parse

quick = settings(database=None, deadline=None, max_examples=40)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (" ring() ", Spec("ring")),
        ("a(b=1, c=-2.5)", Spec("a", (("b", 1), ("c", -2.5)))),
        ("a ( b = 1e-3 )", Spec("a", (("b", 0.001),))),
        ("a(b, c(d=1))", Spec("a", ((None, Spec("b")), (None, Spec("c", (("d", 1),)))))),
        ("a(3, b=c)", Spec("a", ((None, 3), ("b", Spec("c"))))),
    ],
)
def test_read(text, wanted):
    assert parse(text) == wanted
    types = [type(value) for _, value in parse(text).arguments]
    assert types == [type(value) for _, value in wanted.arguments]


NUMBERS = st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6, allow_nan=False)
WORDS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True).filter(
    lambda word: not keyword.iskeyword(word)
)


def arguments(inner):
    """Those without a name come first."""
    unnamed = st.lists(st.tuples(st.none(), NUMBERS | inner), max_size=3)
    named = st.lists(st.tuples(WORDS, NUMBERS | inner), max_size=3)
    return st.builds(lambda first, then: (*first, *then), unnamed, named)


SPECS = st.recursive(
    st.builds(Spec, WORDS),
    lambda inner: st.builds(Spec, WORDS, arguments(inner)),
    max_leaves=6,
)


@given(SPECS)
@quick
def test_written_and_read_again(spec):
    assume(len(str(spec)) <= 300)  # a longer one is refused
    assert parse(str(spec)) == spec


@given(st.text("ab(),=1.- e'", max_size=14))
@quick
def test_any_text_is_read_or_refused(text):
    try:
        assert parse(str(parse(text))) == parse(text)
    except ValueError as error:
        assert "cannot be read" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        *("ring(", "a(b=", "a(b=1))", "a(b 1)", "a(b=1) c", "one-peer(a=1)", "__import__('os')"),
        *("a(b={1: 2})", "1(a)", "a(b)(c)", "a(True)", "a(b=-True)", "a.b(c=1)", "a(1j)"),
    ],
)
def test_cannot_be_read(text):
    with refuses("cannot be read", repr(text)):
        make(text, 8)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("base_k", "base_k"),
        (" base_k ( max_degree = 2 ) ", "base_k(max_degree=2)"),
        ("random_regular(seed=1, degree=3)", "random_regular(degree=3, seed=1)"),
        ("erdos_renyi(probability=1)", "erdos_renyi(probability=1)"),
        ("hierarchical(inner=ring,outer=complete)", "hierarchical(ring, complete)"),
        ("hierarchical(outer=complete, inner=ring)", "hierarchical(ring, complete)"),
        ("hierarchical(outer=base_k( max_degree=2))", "hierarchical(outer=base_k(max_degree=2))"),
    ],
)
def test_names_make_the_same_schedule_again(text, name):
    schedule = make(text, 8, replicas_per_node=4)
    assert schedule.name == name
    again = make(schedule.name, 8, replicas_per_node=4)
    for one, other in zip(schedule.rounds, again.rounds, strict=True):
        np.testing.assert_array_equal(one.matrix, other.matrix)


def test_keywords():
    schedule = make("base_k", 9, max_degree=np.int64(2))
    assert schedule.name == "base_k(max_degree=2)" and schedule.period == 2
    assert make("erdos_renyi", 8, probability=np.float32(0.5), seed=3).name == (
        "erdos_renyi(probability=0.5, seed=3)"
    )
    schedule = make(
        "hierarchical", 8, replicas_per_node=2, inner="complete", outer="base_k(max_degree=3)"
    )
    assert schedule.name == "hierarchical(complete, base_k(max_degree=3))"
    assert make("random_regular(degree=3)", 8, seed=2).name == "random_regular(degree=3, seed=2)"


@pytest.mark.parametrize(
    ("text", "keywords", "message"),
    [
        ("one-peer-exp", {}, "'one-peer-exp' complete ring"),
        ("", {}, "'' complete"),
        ("hierarchical(complete, nope)", {}, "'nope'"),
        ("base_k(2)", {}, "base_k 2 max_degree"),
        ("base_k(ring)", {}, "base_k ring max_degree"),
        ("ring", {"degree": 2}, "ring 'degree' no"),
        ("hierarchical(replicas_per_node=2)", {}, "'replicas_per_node' inner outer"),
        ("base_k(max_degree=1.5)", {}, "base_k max_degree 1.5"),
        ("base_k", {"max_degree": "2"}, "max_degree '2'"),
        ("base_k", {"max_degree": True}, "max_degree True"),
        ("erdos_renyi(probability=ring)", {}, "probability ring"),
        ("hierarchical", {"inner": 2}, "inner schedule 2"),
        ("base_k(max_degree=1)", {"max_degree": 1}, "base_k max_degree twice"),
        ("hierarchical(ring, ring, ring)", {}, "hierarchical ring"),
        ("hierarchical(base_k(degree=2))", {}, "base_k 'degree'"),
    ],
)
@pytest.mark.parametrize("n", [1, 8])
def test_refused_for_any_number_of_replicas(text, keywords, message, n):
    with refuses(*message.split()):
        make(text, n, replicas_per_node=4, **keywords)
