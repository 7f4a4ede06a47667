"""Turn a paged pool into a cache of one sequence.

This room imports graph and the contracts.
"""
