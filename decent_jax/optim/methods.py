"""Every method by its name.

>>> import optax
>>> from decent_jax import topology
>>> parts = Parts(topology.make("bidirectional_ring", 8), 0.1, optax.sgd(0.1))
>>> tx = METHODS["gradient_tracking"].build(parts)
>>> METHODS["gradient_tracking"].messages, METHODS["gradient_tracking"].copies
(2, 2)
>>> numbers("slowmo")
{'alpha': 1.0, 'beta': 0.7}
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from decent_jax.optim.choco import CHOCO
from decent_jax.optim.corrected import D2, EXACT_DIFFUSION, GRADIENT_TRACKING, PUSH_SUM
from decent_jax.optim.decentralized import (
    ACCUM_ADAM,
    ALL_REDUCE,
    DECENTRALIZED_ADAM,
    DECENTRALIZED_SGD,
)
from decent_jax.optim.declaration import Method, Parts
from decent_jax.optim.momentum import (
    DECENTLAM,
    GOSSIPED_MOMENTUM,
    QUASI_GLOBAL_ADAM,
    QUASI_GLOBAL_SGD,
)
from decent_jax.optim.outer import DILOCO, SLOWMO
from decent_jax.optim.swarm import SWARM

__all__ = ["METHODS", "Method", "Parts", "numbers", "register", "sections"]

_METHODS: dict[str, Method] = {}
METHODS: Mapping[str, Method] = MappingProxyType(_METHODS)


def register(method: Method) -> Method:
    """Make a method of your own known by its name, as `METHODS` and in configs.

    Call it in the module of the method, which a config file imports; the config then has a section
    with the method's numbers.

    Raises:
      ValueError: the name is taken.
    """
    if method.name in _METHODS:
        raise ValueError(f"there is a method {method.name!r} already; give yours another name")
    _METHODS[method.name] = method
    return method


def numbers(name: str) -> dict[str, Any]:
    """The own numbers of the method of that name, and their defaults."""
    return METHODS[name].numbers


def sections() -> dict[str, dict[str, Any]]:
    """The sections of a config: the numbers of all methods that share one; "" is no section."""
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS.values():
        if method.numbers:
            found.setdefault(method.config_section, {}).update(method.numbers)
    return found


for _method in (
    *(ALL_REDUCE, DECENTRALIZED_ADAM, ACCUM_ADAM, DECENTRALIZED_SGD),
    *(GOSSIPED_MOMENTUM, QUASI_GLOBAL_SGD, QUASI_GLOBAL_ADAM, DECENTLAM),
    *(EXACT_DIFFUSION, D2, GRADIENT_TRACKING, PUSH_SUM),
    *(SLOWMO, DILOCO, CHOCO, SWARM),
):
    register(_method)
