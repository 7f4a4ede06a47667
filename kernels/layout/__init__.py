"""The bytes of a packed cache: where tokens, scales and exact blocks lie, and the constants that kernels compile with.

This room imports formats and lang.
"""
