"""Predict and plan before renting a cluster: which algorithm, which schedule, what goes where."""
