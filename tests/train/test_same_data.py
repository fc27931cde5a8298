"""Facts by which processes and sessions of a run find out that they read the same data."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from decent_jax.train.experiment import facts_of


@pytest.mark.parametrize("path", ["", "stdlib", "empty", "a file", "a file/below", "prepared"])
def test_facts_of_data_that_no_folder_or_an_unprepared_one_holds(path, tmp_path, monkeypatch):
    """Python's own library has no folder when they are compared."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("a file").touch()
    Path("prepared").mkdir()
    Path("prepared/manifest.json").write_text('{"splits": {"train": 1}}')
    task = SimpleNamespace(train_source=range(4), eval_source=range(2))
    found = facts_of(ConfigDict({"data": {"path": path}}), task)
    assert found["the training data"] == "4 records" and found["some of the records"]
    assert ("the manifest of data.path" in found) == (path == "prepared")


def test_other_records_of_the_same_number_are_other_data():
    """Unless a source gives another record at each look, or none."""

    def facts(source):
        task = SimpleNamespace(train_source=source, eval_source=[])
        return facts_of(ConfigDict({"data": {}}), task)

    def dicts(last):
        return [{"x": np.arange(3), "y": np.int8(k)} for k in (0, 1, last)]

    class Raises(list):
        def __getitem__(self, index):
            raise KeyError(index)

    class Draws(list):
        def __getitem__(self, index):
            return np.random.default_rng().normal(size=3)

    pairs = ([1, 2, 3], [1, 2, 4]), ([b"a", b"b"], [b"c", b"b"]), (dicts(2), dicts(3)), ([], [0])
    pairs += (([("jpeg", 0, "a")], [("jpeg", 1, "a")]),)
    for one, other in pairs:
        assert facts(one) == facts(list(one)) != facts(other)
    for source in (Raises([0]), Draws([0]), [object()], [{"x": np.array([object()])}]):
        assert "some of the records" not in facts(source)
