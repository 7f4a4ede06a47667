"""Stage B, before analysis: small rewrites after which there are fewer forms to analyse.

This room imports graph and the contracts.
"""
