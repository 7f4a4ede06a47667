"""Code that depends on releases of PyTorch, Triton and Transformers: their private names, and the tested releases.

No other room uses a name that is private or undocumented. A comment on each of these names gives its purpose, and the
fallback for releases of PyTorch that lack it. The tests in ``tests/compat`` import each name, and check its signature
or its behaviour. This room imports no other room.
"""
