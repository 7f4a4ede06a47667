"""Mark the attention in a graph, prove its caches, and rewrite the graph to packed caches.

``pipeline.py`` is the list of all passes. This folder imports only ``kvcompile.kernels`` and ``kvcompile.compat``.
"""
