"""Packed caches as tensors: what every PyTorch operator does to them in eager and traced code.

This room imports kernels only.
"""
