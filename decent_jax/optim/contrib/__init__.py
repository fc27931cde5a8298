"""Methods that few use; the rule of entry is in CONTRIBUTING.md, "Add an algorithm"."""

from decent_jax.optim.contrib.compressed import choco as choco
from decent_jax.optim.contrib.compressed import sparta as sparta
from decent_jax.optim.contrib.compressed import sparta_diloco as sparta_diloco
from decent_jax.optim.contrib.corrected import d2 as d2
from decent_jax.optim.contrib.corrected import exact_diffusion as exact_diffusion
from decent_jax.optim.contrib.corrected import gradient_tracking as gradient_tracking
from decent_jax.optim.contrib.demo import demo as demo
from decent_jax.optim.contrib.momentum import decentlam as decentlam
from decent_jax.optim.contrib.momentum import gasloc as gasloc
from decent_jax.optim.contrib.momentum import quasi_global_sgd as quasi_global_sgd
from decent_jax.optim.contrib.momentum import slowmo as slowmo
