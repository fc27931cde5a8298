"""The plan file and the order of micro-batches, which the planner and the trainers share."""
