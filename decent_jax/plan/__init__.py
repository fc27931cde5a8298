"""The plan file, which the planner and the trainers share, and the order of micro-batches."""
