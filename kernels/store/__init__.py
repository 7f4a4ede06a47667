"""Quantize-on-store: kernels that write new tokens to packed caches.

This room imports tiles, spec and the rooms below them. README.md names the bottleneck of each kernel.
"""
