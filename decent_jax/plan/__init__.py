"""What a planner decides and runners read: the plan file and the order of micro-batches."""
