"""Measurements of time, shared by ``python -m kvcompile bench`` and the programs in ``benchmarks/``.

This room imports kernels, and policy for the names of presets.
"""
