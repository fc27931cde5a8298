"""The commands of ``decent-jax``: thin modules, each with a `main`."""
