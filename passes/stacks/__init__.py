"""Split an input that holds several caches into one input for each.

This room imports graph and the contracts.
"""
