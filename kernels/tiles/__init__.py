"""Building blocks of kernels on packed data: loading, unpacking, rotating, and which tokens a query sees.

This room imports layout, formats and lang.
"""
