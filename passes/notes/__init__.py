"""What a node does for a site, noted for reports, drawings and dumps.

This room imports prove, graph and the contracts. Nothing that is compiled depends on it.
"""
