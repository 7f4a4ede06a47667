"""Stage B, before analysis: an input that holds several caches becomes one input for each.

This room imports graph and the contracts.
"""
