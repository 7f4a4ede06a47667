"""Calling a compiled graph: adopting plain caches, passing packed data, wrapping outputs.

This package imports packed, policy, report and passes.
"""
