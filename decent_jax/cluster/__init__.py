"""The processes of one program: start-up barrier, watch over each other, preflight check."""

from decent_jax.ground import extras

extras.need("train", "ml_collections", "tqdm")
