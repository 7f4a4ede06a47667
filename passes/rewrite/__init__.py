"""Replace proven caches by packed caches, their writes by stores, and markers by attention on packed data.

This room imports prove, graph, the contracts and the operators of kernels.
"""
