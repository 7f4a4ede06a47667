"""Gathering tokens of a paged cache as packed bytes.

This room imports layout, spec and lang.
"""
