"""Ray actors: start, place, call, watch and end them.

`ray_cluster` starts Ray or connects to it, and initializes the processes of actors; `handles` calls
actors and finds out how each ended. Actors communicate over `decent_jax.ground.connections`.
"""

from dataclasses import dataclass

from decent_jax.ground.fields import changeable


@dataclass(frozen=True)
class Ray:
    """The Ray cluster that runs the peers or stages, and the resources that each reserves there."""

    address: str = changeable("", '"auto" or "host:port" of a Ray cluster; empty: this machine')
    cpus: float = changeable(0.0, "cores that Ray reserves per peer or stage; 0: none", at_least=0)
    gpus: float = changeable(0.0, "GPUs that Ray assigns per peer or stage", at_least=0)
