"""Put one marker operator in the place of every attention, in Dynamo's graph.

This room imports graph and the contracts.
"""
