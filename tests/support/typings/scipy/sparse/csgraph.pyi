"""Graphs as sparse matrices."""

import numpy as np
from scipy.sparse import csr_array

def connected_components(
    csgraph: csr_array, directed: bool = True, connection: str = "weak"
) -> tuple[int, np.ndarray]: ...
def maximum_bipartite_matching(graph: csr_array, perm_type: str = "row") -> np.ndarray: ...
