"""Which tokens of a prepared folder come from which document source: `sources.json`.

A source is an input file or data set of `decent-jax prepare text`, or a package of the standard
library. Documents have the order of their sources, so a source is one run of tokens or a few:

    {"names": ["a.jsonl", "b.jsonl"], "splits": {"train": [[0, 5120], [1, 2048]], "val": ...}}

each run is [index of the name, tokens, separators included], in the order of the `.bin` file.
"""

import dataclasses
from pathlib import Path

import numpy as np

from decent_jax.data.reading import entries_of
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import read_json

FILE = "sources.json"


@dataclasses.dataclass(frozen=True)
class Sources:
    """The runs of a split: run i is tokens `ends[i - 1]` to `ends[i] - 1` of source `index[i]`."""

    names: tuple[str, ...]
    index: np.ndarray  # (runs,) int64, into names
    ends: np.ndarray  # (runs,) int64, ascending

    def of_tokens(self, positions: np.ndarray) -> np.ndarray:
        """int64, of the shape of `positions`: the source of the tokens there."""
        return self.index[np.searchsorted(self.ends, positions, side="right")]


def read(bin_file: str | Path, num_tokens: int) -> Sources:
    """The sources of the tokens of a `.bin` file, from `sources.json` in its folder.

    Raises:
      DataError: there is none, or it belongs to another file.
    """
    bin_file = Path(bin_file)
    path = bin_file.parent / FILE
    damaged = "damaged; prepare the folder again"
    try:
        content = read_json(path, damaged)
    except FileNotFoundError:
        raise DataError(
            f"{bin_file.parent}: has no {FILE} that says which document source its tokens are"
            " from; prepare it again with `decent-jax prepare text`, or set"
            " data.partition to 'iid'"
        ) from None
    with entries_of(path, damaged):
        names, runs = tuple(map(str, content["names"])), content["splits"][bin_file.stem]
        index, tokens = np.array(runs, np.int64).reshape(-1, 2).T
    known = index.min(initial=0) >= 0 and index.max(initial=0) < len(names)
    if tokens.sum() != num_tokens or tokens.min(initial=1) < 0 or not known:
        raise DataError(f"{path}: does not belong to {bin_file.name}; prepare the folder again")
    return Sources(names, index, np.cumsum(tokens))
