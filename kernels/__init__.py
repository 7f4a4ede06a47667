"""Numbers in, numbers out: formats of packed caches, their specification, operators and Triton kernels.

Nothing here knows a graph or a model. This folder imports nothing of the rest of the package.
"""
