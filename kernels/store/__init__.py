"""Quantize-on-store: kernels that write new tokens to packed caches.

This room imports tiles and the rooms below it. README.md names the bottleneck of each kernel.
"""
