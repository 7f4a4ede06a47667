"""The specification of packed caches in plain PyTorch: writing, reading, exact recent tokens, attention.

Kernels are tested against this room, and a CPU runs its functions. The room imports layout and formats.
"""
