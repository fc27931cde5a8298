"""What XLA's CPU backend needs to be fast; on other backends nothing of it runs."""
