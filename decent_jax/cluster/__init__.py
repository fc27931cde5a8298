"""The processes of one run: start-up barrier, watch, supervision and preflight check."""

from decent_jax.ground import extras

extras.need("train", "ml_collections", "tqdm")
