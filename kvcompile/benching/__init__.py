"""Measuring time: what ``python -m kvcompile bench`` and the programs in ``benchmarks/`` share."""
