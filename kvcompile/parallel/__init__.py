"""Several ranks: the option ``context_parallel``, the ranks of a cache, their agreement, and their report together.

This room imports report, passes, the layouts of kernels and compat.
"""
