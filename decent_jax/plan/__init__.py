"""What planner and runners share: the plan file and the order of micro-batches."""
