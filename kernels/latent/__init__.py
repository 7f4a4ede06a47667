"""Attention on latents (multi-head latent attention), whose keys and values are one cache.

This room imports attention, store, deepseek_v4 and the rooms below them.
"""
