"""Stage B, before analysis: a paged pool becomes a cache of one sequence.

This room imports graph and the contracts.
"""
