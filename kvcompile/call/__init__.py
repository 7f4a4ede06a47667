"""Calling a compiled graph: adopting plain caches, unpacking, passing packed data, wrapping outputs.

This room imports packed, policy, report, passes, kernels and parallel.
"""
