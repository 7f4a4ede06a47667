"""The errors of a measurement."""

from __future__ import annotations

from kvcompile.errors import InputError


class BenchError(InputError):
    """A measurement is impossible: the message names the option or the device, and the remedy."""


class NoCudaError(BenchError, RuntimeError):
    """The measurement needs a CUDA device, and PyTorch finds none."""
