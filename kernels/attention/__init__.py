"""Attention on packed caches: a decode kernel for few query rows, and a prefill kernel for many.

This room imports tiles, spec and the rooms below them. README.md names the bottleneck of each kernel.
"""
