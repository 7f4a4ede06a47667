"""The check of a rewrite: the rewritten graph and the original graph run on the same random inputs.

This room imports call, packed, debugging and passes. docs/verify.md explains the check.
"""
