"""The tools of every pass to read and change a graph: operators, states of a cache, names, and inserted nodes.

From passes, this room imports the contracts at the root and nothing else.
"""
