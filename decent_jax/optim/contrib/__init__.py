"""Rarely used methods; for the requirements see CONTRIBUTING.md, "Add an algorithm"."""

from decent_jax.optim.contrib.choco import choco as choco
from decent_jax.optim.contrib.corrected import d2 as d2
from decent_jax.optim.contrib.corrected import exact_diffusion as exact_diffusion
from decent_jax.optim.contrib.corrected import gradient_tracking as gradient_tracking
from decent_jax.optim.contrib.quasi_global import quasi_global_sgd as quasi_global_sgd
