"""Which layer gets which format: policies, their text, presets and static scales.

This room imports the contracts of passes and kernels.
"""
