"""Models in Flax NNX, each behind a functional adapter: ``init`` and ``apply`` on plain pytrees."""
