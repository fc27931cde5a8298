"""Processes by Ray: started, placed, called, watched and ended; and what they say to each other.

`ray_cluster` starts Ray or finds it, `handles` has the actors and how each has ended, `process`
what an actor's process does first, and `messages` carries arrays between two actors without Ray.
"""
