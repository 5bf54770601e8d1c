"""What an energy must beat: models that sum to one token by token, at the same cost."""
