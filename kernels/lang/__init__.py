"""Triton, and additions to it: its import, exact rounding, small tile operations, fast launches.

This room imports nothing else of the project.
"""
