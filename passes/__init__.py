"""Graph in, graph out: attention is marked, its caches are proven, and the graph is rewritten to packed caches.

``pipeline.py`` is the list of all passes. This folder imports only ``kvcompile.kernels``
and ``kvcompile.compat``.
"""
