"""Files that users name: reading them within bounds, and the digests that saved caches and transforms carry.

This package imports compat.
"""
