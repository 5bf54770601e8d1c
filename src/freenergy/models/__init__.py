"""Which density do parts make? log_score from a base and an energy."""
