"""Add one marker operator to every attention, in Dynamo's graph.

This room imports graph and the contracts.
"""
