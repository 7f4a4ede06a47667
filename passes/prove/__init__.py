"""Find the caches that every marker reads, and prove that each of their uses is understood.

This room imports graph and the contracts. It changes no graph.
"""
