"""What the training loop trains: one module per task."""
