"""Where the texts of a base that only samples come from."""
