"""Data-parallel training without all-reduce: replicas that gossip, in JAX."""

__version__ = "0.1.0"
