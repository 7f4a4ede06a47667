"""Judges from outside: tests and reference models of other projects, run unchanged, first plainly and then packed.

``sources.py`` finds the code of the other projects, which this repository does not contain. ``plugin.py`` is a plugin
of pytest that puts ``kvquant`` under tests which know nothing of it, in one of the ways of ``ways_*.py``.
``running.py`` runs test modules with the plugin, each in its own process, and ``verdict.py`` compares the outcomes.
``judges.py`` lists the test modules. ``reference_models.py`` has models with their own loops, for ``loops.py``.
``command.py`` is the command that runs all of them and writes docs/outside.json.
"""
