"""The bytes of a packed cache: which block, section and byte holds what, and what kernels know of it at compile time.

This room imports formats and lang.
"""
