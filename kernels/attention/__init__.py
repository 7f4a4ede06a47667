"""Attention on packed caches: a decode kernel for few query rows, and a prefill kernel for many.

This room imports tiles and the rooms below it. README.md names the bottleneck of each kernel.
"""
