"""Every picture the project draws, in one style."""

from decent_jax.ground import extras

extras.need("train", "matplotlib")
