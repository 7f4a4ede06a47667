"""A fuzzer of whole programs: decode steps and the eager code between them, run on packed and on plain caches.

``program.py`` has the tree of a program, ``draw.py`` draws it, ``step_text.py`` and ``drive_text.py`` write it as
Python, ``oracle.py`` runs it plain and packed, and ``search.py`` looks for programs whose results differ. ``faults.py``
has faults of the passes, which the same search must find. docs/fuzzing.md describes the fuzzer.
"""
