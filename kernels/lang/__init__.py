"""Triton itself and what is missing in it: imports, rounding, small tile operations, fast launches.

This room imports nothing else of the project.
"""
