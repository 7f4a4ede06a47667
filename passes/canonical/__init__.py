"""Small rewrites before analysis, which bring a graph to fewer forms.

This room imports graph and the contracts.
"""
