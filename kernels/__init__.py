"""Cache formats, their specification in plain PyTorch, and the Triton kernels that agree with it.

This folder imports only ``kvcompile.compat``. README.md lists its rooms and defines its words.
"""
