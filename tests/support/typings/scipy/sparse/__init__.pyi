"""Sparse matrices, as this project uses them."""

from typing import Any

import numpy as np

class csr_array:
    def __init__(
        self,
        arg1: np.ndarray | tuple[np.ndarray, tuple[np.ndarray, np.ndarray]],
        shape: tuple[int, int] | None = None,
        dtype: Any = None,
    ) -> None: ...
