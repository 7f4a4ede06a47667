"""Policies, which choose a format for every layer: their fields, their text, presets and static scales.

This room imports files, kernels and the contracts of passes.
"""
