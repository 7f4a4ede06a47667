"""The version of kvcompile, which all other code imports."""

VERSION = "0.1.0"
