"""A sentence keeps its field, what was expected and its remedy, however long its values are."""

import pytest

from decent_jax.ground import errors

KINDS = [errors.ConfigError, errors.DataError, errors.RunError, errors.CheckpointError]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [10, 300, 4000])
def test_a_long_path_costs_no_word_of_the_sentence(kind, length):
    path = "/" + "x" * length + "/config.json"
    words = "--workdir {} holds another run (seed: 1 -> 2), from {}; take another --workdir"
    said = str(kind(words.format(path, path)))
    assert len(said) <= kind.longest
    for part in ("--workdir /x", "json holds another run (seed: 1 -> 2), from /x"):
        assert part in said
    assert said.endswith("config.json; take another --workdir")
