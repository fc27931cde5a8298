"""Ray actors: start, place, call, watch and end them.

`ray_cluster` starts Ray or connects to it, and initializes the processes of actors; `handles` has
the actors and how each ended. They communicate over `decent_jax.ground.connections`.
"""
