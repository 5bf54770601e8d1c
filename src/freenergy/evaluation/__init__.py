"""A number with its uncertainty."""
