"""Everything that depends on a release of PyTorch, Triton or Transformers: private names, and the tested releases.

No other room uses a name that is private or undocumented. Every such name has a comment that says what it is for, and
what takes over where a release of PyTorch lacks it. The tests in ``tests/compat`` import each name, and check its
signature or its behaviour. This room imports no other room.
"""
