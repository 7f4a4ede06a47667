"""Functions with which users make, save and load packed caches.

This room imports packed, policy, files, kernels, the contracts of passes, and parallel. Its functions import
Transformers.
"""
