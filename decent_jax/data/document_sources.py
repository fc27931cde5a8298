"""Which tokens of a prepared folder come from which document source: ``sources.json``.

A source is an input file or data set of ``prepare_text``, or a package of the standard library.
Documents lie in the order of their sources, so a source is one run of tokens or a few:

    {"names": ["a.jsonl", "b.jsonl"], "splits": {"train": [[0, 5120], [1, 2048]], "val": ...}}

each run is [index of the name, tokens, separators included], in the order of the ``.bin`` file.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from decent_jax.errors import DataError

FILE = "sources.json"


@dataclasses.dataclass(frozen=True)
class Sources:
    """The runs of a split: run i is tokens ``ends[i - 1]`` to ``ends[i] - 1`` of ``index[i]``."""

    names: tuple[str, ...]
    index: np.ndarray  # (runs,) int64, into names
    ends: np.ndarray  # (runs,) int64, ascending

    def of_tokens(self, positions: np.ndarray) -> np.ndarray:
        """int64, the shape of ``positions``: which source the tokens there come from."""
        return self.index[np.searchsorted(self.ends, positions, side="right")]


class SourcesCounter:
    """Counts tokens by source while documents are written."""

    def __init__(self, splits):
        self._indices: dict[str, int] = {}
        self._runs: dict[str, list[list[int]]] = {split: [] for split in splits}
        self._complete = True

    def add(self, split: str, source: str | None, tokens: int) -> None:
        """A document of so many tokens follows; one without a source spoils the record."""
        if source is None:
            self._complete = False
            return
        index = self._indices.setdefault(source, len(self._indices))
        runs = self._runs[split]
        if runs and runs[-1][0] == index:
            runs[-1][1] += tokens
        else:
            runs.append([index, tokens])

    def content(self) -> dict | None:
        """Of the file; None where a document had no source."""
        return {"names": list(self._indices), "splits": self._runs} if self._complete else None


def read(bin_file: str | Path, num_tokens: int) -> Sources:
    """The sources of the tokens of a ``.bin`` file, from ``sources.json`` beside it.

    Raises:
      DataError: there is none, or it is of another file.
    """
    bin_file = Path(bin_file)
    path = bin_file.parent / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names, runs = content["names"], content["splits"][bin_file.stem]
        index, tokens = np.array(runs, np.int64).reshape(-1, 2).T
        fits = tokens.sum() == num_tokens and index.max(initial=0) < len(names)
    except FileNotFoundError:
        raise DataError(
            f"{bin_file.parent}: has no {FILE} that says which document source its tokens are"
            " from; prepare it again with `python -m decent_jax.data.prepare_text`, or set"
            " data.partition to 'iid'"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{path}: damaged; prepare the folder again") from None
    if not fits:
        raise DataError(f"{path}: does not belong to {bin_file.name}; prepare the folder again")
    return Sources(tuple(names), index, np.cumsum(tokens))
