"""Every method by its name.

>>> import optax
>>> from decent_jax import topology
>>> parts = Parts(topology.make("bidirectional_ring", 8), 0.1, optax.sgd(0.1))
>>> tx = METHODS["gradient_tracking"].build(parts)
>>> METHODS["gradient_tracking"].messages, METHODS["gradient_tracking"].copies
(2, 2)
>>> METHODS["slowmo"].numbers
{'alpha': 1.0, 'beta': 0.7}
"""

from collections.abc import Mapping
from types import MappingProxyType

from decent_jax.optim.choco import METHODS as CHOCO
from decent_jax.optim.corrected import METHODS as CORRECTED
from decent_jax.optim.declaration import Method, Parts
from decent_jax.optim.guard import METHODS as GUARDED
from decent_jax.optim.momentum import METHODS as MOMENTUM
from decent_jax.optim.outer import METHODS as OUTER
from decent_jax.optim.slowmo import METHODS as SLOWMO
from decent_jax.optim.sparta import METHODS as SPARTA
from decent_jax.optim.swarm import METHODS as SWARM

__all__ = ["METHODS", "Method", "Parts", "register"]

_DECLARED = (*GUARDED, *MOMENTUM, *CORRECTED, *SLOWMO, *OUTER, *CHOCO, *SPARTA, *SWARM)
_METHODS = {method.name: method for method in _DECLARED}
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
