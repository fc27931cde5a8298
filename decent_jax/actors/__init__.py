"""Processes by Ray: started, placed, called, watched and ended.

`ray_cluster` starts Ray or finds it, and says what an actor's process does first; `handles` has the
actors and how each has ended. They talk to each other over `decent_jax.ground.connections`.
"""
