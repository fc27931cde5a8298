"""The interface between planner and runners: the plan file and the order of micro-batches."""
