"""What depends on releases of PyTorch, Triton and Transformers: their private names, and the table of tested releases.

No other room uses a name that is private or undocumented. Every such name has a comment that says what it is for, and
what takes over where a release of PyTorch lacks it. The tests in ``tests/compat`` import each name, and check its
signature or its behaviour. This room imports no other room.
"""
