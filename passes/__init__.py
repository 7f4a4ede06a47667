"""Graph in, graph out: attention is marked, its caches are proven, and the graph is rewritten to packed caches.

``pipeline.py`` is the list of all passes. It imports only ``kvcompile.kernels`` and
``kvcompile.compat``.
"""
