"""Cache formats, their meaning in plain PyTorch, and the Triton kernels that agree with it.

This folder imports nothing else of the project but ``kvcompile.compat``. README.md lists its rooms and defines its words.
"""
