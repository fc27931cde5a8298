"""The commands of ``decent-jax``: thin, each a module with a `main`."""
