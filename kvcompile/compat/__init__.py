"""Code that depends on releases of PyTorch, Triton and Transformers: their private names, and the tested releases.

No other room uses a name that is private or undocumented. Every such name has a comment with its purpose, and with the
fallback for releases of PyTorch that lack it. The tests in ``tests/compat`` import each name, and check its signature
or its behaviour. This room imports no other room.
"""
