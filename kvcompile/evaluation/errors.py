"""The errors of an evaluation."""

from __future__ import annotations

from kvcompile.errors import InputError


class EvaluationError(InputError):
    """An evaluation is impossible: the message names the model, the file or the option, and the remedy."""
