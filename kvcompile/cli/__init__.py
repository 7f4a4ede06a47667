"""The command line: one module a command, assembled in :mod:`kvcompile.cli.app`.

Exit codes: 0 all is well; 1 the answer is no, or a check failed; 2 the user's mistake. Results go to stdout, as tables
of at most 100 columns or, with ``--json``, as one JSON value; everything else goes to stderr.

Modules of commands are imported to show the help: what is heavy (PyTorch) they import in their functions.
"""
