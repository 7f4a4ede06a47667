"""Bounded reading of files that users name, and the digests in saved caches and transforms.

This package imports compat.
"""
