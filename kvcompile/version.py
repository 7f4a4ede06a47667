"""The version of kvcompile. No other file contains it."""

VERSION = "0.1.0"
