"""Sources of examples, prepared token folders, and batches addressed by (step, replica)."""
