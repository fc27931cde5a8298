"""Data-parallel training without all-reduce: replicas that gossip, in JAX.

Your own training loop needs only `topology`, `gossip`, `replicas` and `optim`, which depend on jax,
optax, NumPy and SciPy. `planner`, `train` and the packages that `train` uses need
``decent_jax[train]``.
"""

import importlib
import pkgutil
from typing import Any

__version__ = "0.1.0"

_ROOMS = [module.name for module in pkgutil.iter_modules(__path__)]


def __getattr__(name: str) -> Any:
    """Imports a package at its first use, as in ``import decent_jax; decent_jax.topology``.

    ``decent_jax.run`` is `decent_jax.train.run`.
    """
    if name == "run":
        return importlib.import_module("decent_jax.train").run
    if name not in _ROOMS:
        raise AttributeError(f"module 'decent_jax' has no attribute {name!r}")
    return importlib.import_module(f"decent_jax.{name}")


def __dir__() -> list[str]:
    return sorted({"__version__", "run", *_ROOMS})
