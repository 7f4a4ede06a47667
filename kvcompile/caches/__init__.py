"""Functions with which users make, save and load packed caches.

This room imports packed, policy, files, kernels, the contracts of passes, and ``context_parallel.py``. Its functions
import Transformers.
"""
