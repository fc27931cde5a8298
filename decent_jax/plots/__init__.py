"""All figures of the project, in one style."""

from decent_jax.ground import extras

extras.need("train", "matplotlib")
