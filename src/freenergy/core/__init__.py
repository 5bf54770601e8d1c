"""What everything else is made of: sequences, spaces, randomness, roles, files."""
