"""Stage A, on Dynamo's graph: attention in any form becomes one marker operator.

This room imports graph and the contracts.
"""
