"""Sources of examples, prepared token folders, and batches addressed by (step, replica)."""

from decent_jax.ground import extras

extras.need("train", "grain")
