"""Measurements of time, shared by ``python -m kvcompile bench`` and the programs in ``benchmarks/``.

This room imports kernels, the format pairs of passes, and policy for the names of presets.
"""
