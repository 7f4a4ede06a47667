"""Stage B, analysis: find the caches behind every marker and prove that each use of them is understood.

This room imports graph and the contracts. It changes no graph.
"""
