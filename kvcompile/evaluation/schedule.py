"""The steps in which a window of text is read: one prefill, then decode steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvcompile.evaluation.errors import EvaluationError


@dataclass(frozen=True)
class Schedule:
    """The steps in which a model reads a window. Every token except the first one of the window is predicted.

    Attributes:
        prefill: tokens of the first step.
        decode: tokens of all later steps together.
        chunk: tokens of one later step.

    Raises:
        EvaluationError: ``decode`` is not a multiple of ``chunk``.
    """

    prefill: int = 2048
    decode: int = 256
    chunk: int = 1

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode, self.chunk) < 1:
            raise EvaluationError("--prefill, --decode and --chunk must be at least 1")
        if self.decode % self.chunk:
            raise EvaluationError(
                f"--decode {self.decode} is not a multiple of --chunk {self.chunk}, and all steps must have the same "
                "length"
            )

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model reads, and the capacity of its cache."""
        return self.prefill + self.decode

    @property
    def window_tokens(self) -> int:
        """The number of tokens in a window. The last token is only predicted."""
        return self.num_tokens + 1

    def steps(self) -> list[slice]:
        """The positions of every step."""
        starts = [0, *range(self.prefill, self.num_tokens, self.chunk), self.num_tokens]
        return [slice(start, stop) for start, stop in itertools.pairwise(starts)]
