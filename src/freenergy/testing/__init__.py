"""Public checks: does my class play its role? And an Rng that walks every branch."""
