"""Discrete features of sentences (Table 3.2 of Ou 2024): one weight per pattern of words and classes."""
