"""``generate()`` and ``generate_batch()`` of a compiled Transformers model, whose caches are packed from the start.

This room imports backend, caches, call, options and report. Its functions import Transformers.
"""
