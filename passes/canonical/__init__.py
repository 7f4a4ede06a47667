"""Small rewrites before the analysis, which leave fewer forms to analyse.

This room imports graph and the contracts.
"""
