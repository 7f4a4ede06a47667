"""The errors of an evaluation."""

from __future__ import annotations

from kvcompile.errors import KVCompileError


class EvaluationError(KVCompileError, ValueError):
    """An evaluation is impossible: the message names the model, the file or the option, and the remedy."""
