"""Sweeps: rows of a table, each a run for every seed, with controls of equal compute and paired comparisons."""
