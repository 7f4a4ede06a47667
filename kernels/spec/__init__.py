"""The meaning of packed caches in plain PyTorch: writing, reading, exact recent tokens, attention.

Every kernel is tested against this room, which imports layout and formats. A CPU runs it as it is.
"""
