"""``python -m kvcompile``: the command line."""

from kvcompile.cli.app import main

if __name__ == "__main__":
    main()
