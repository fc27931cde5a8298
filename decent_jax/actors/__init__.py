"""Ray actors: start, place, call, watch and end them.

`ray_cluster` starts Ray or connects to it, and initializes the processes of actors; `handles` calls
actors and finds out how each ended. Actors communicate over `decent_jax.ground.connections`.
"""
