"""Stage B, rewriting: proven caches become packed ones, writes become stores, markers become packed attention.

This room imports prove, graph, the contracts and the operators of kernels.
"""
