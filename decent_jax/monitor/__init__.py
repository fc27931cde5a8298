"""The numbers that a run measures of itself, where they go, and who reads them."""
