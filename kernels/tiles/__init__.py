"""Building blocks of kernels on packed data: loading, unpacking, rotating, and the tokens that a query sees.

This room imports layout, formats and lang.
"""
