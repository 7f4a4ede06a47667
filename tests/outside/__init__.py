"""Judges from outside: tests and reference models of other projects, run unchanged, first plainly and then packed.

``sources.py`` finds the code of the other projects, which this repository does not contain. ``plugin.py`` is a plugin of
pytest that puts ``kvquant`` under tests which know nothing of it. ``running.py`` runs test modules with the plugin, each
in a process of its own, and ``verdict.py`` compares the outcomes. ``reference_models.py`` drives models by their own
loops. ``command.py`` is the command that runs all of them and writes docs/outside.json.
"""
