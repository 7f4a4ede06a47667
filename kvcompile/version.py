"""The version of kvcompile, the only place that names it."""

VERSION = "0.1.0"
