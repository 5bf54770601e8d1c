"""One loop, checkpoints, exact resume."""
