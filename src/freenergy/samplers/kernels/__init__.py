"""Markov chain kernels: each leaves its target invariant.

Every kernel has the same names in the same order: State, Info, the settings class with ``init`` and ``step``.
"""
