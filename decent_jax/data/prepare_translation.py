"""The former name of `decent-jax prepare translation`."""

from decent_jax.prepare import former

if __name__ == "__main__":
    raise SystemExit(former("translation"))
