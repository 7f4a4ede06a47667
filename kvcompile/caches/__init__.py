"""Functions with which users make, save and load packed caches.

This room imports packed and policy. Only this room and evaluation import Transformers.
"""
