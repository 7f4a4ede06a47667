"""Policies, which choose a format for every layer: their fields, their text, presets and static scales.

This room imports the contracts of passes and kernels.
"""
