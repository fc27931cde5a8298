"""Models in Flax NNX, each behind a functional adapter: ``init`` and ``apply`` on plain pytrees."""

from decent_jax.ground import extras

extras.need("train", "flax", "safetensors")
