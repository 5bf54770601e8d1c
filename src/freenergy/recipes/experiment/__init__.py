"""Rows of a table, seeds, a control of equal compute: what a method is worth."""
