"""What every pass needs to read a graph: operators, states of a cache, names, and inserting nodes.

This room imports the contracts at the root of passes and nothing else of passes.
"""
