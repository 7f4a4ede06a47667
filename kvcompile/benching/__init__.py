"""Measurements of time, shared by ``python -m kvcompile bench`` and the programs in ``benchmarks/``."""
