"""Private and undocumented names of PyTorch, Triton and Transformers. No other room uses such names.

Every name has a comment that says what it is for, and what takes over where a release of PyTorch lacks it. The tests in
``tests/compat`` import each name, and check its signature or its behaviour. This room imports no other room.
"""
