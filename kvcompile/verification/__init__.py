"""The check of a rewrite: a rewritten graph runs beside the original graph on random inputs.

This room imports call, packed, debugging and passes. docs/verify.md explains the check.
"""
