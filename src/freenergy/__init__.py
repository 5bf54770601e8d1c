"""freenergy: energy-based models of text."""
