"""The command line: one module for each command, assembled in :mod:`kvcompile.cli.app`.

Exit codes: 0 for success; 1 if the answer is no or a check failed; 2 for a mistake in the arguments. Results go to
stdout, as tables of at most 100 columns or, with ``--json``, as one JSON value. Everything else goes to stderr.

The help imports the module of every command. Heavy packages such as PyTorch are imported inside the commands.
"""
