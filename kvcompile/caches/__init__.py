"""Packed caches that users make, save and load.

This room imports packed and policy, and is the one beside evaluation that imports Transformers.
"""
