"""The errors of a measurement."""

from __future__ import annotations

from kvcompile.errors import KVCompileError


class BenchError(KVCompileError, ValueError):
    """Nothing can be measured so: the message names the option or the device, and the remedy."""


class NoCudaError(BenchError, RuntimeError):
    """A measurement of a CUDA device was asked for where there is none."""
