"""The text of an evaluation: windows of tokens, spread evenly over a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import cut
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.hub import hub_arguments
from kvcompile.evaluation.models import first_line, reads_bytes, text_config
from kvcompile.evaluation.schedule import Schedule
from kvcompile.files.reading import is_folder, read_file

HELD_OUT = "val.bin"
"""The default text of a byte-level model, a file in the model's folder."""

MAX_TOKENS = 1 << 25
"""The maximum number of tokens in all windows together."""

MAX_TEXT = 1 << 26
"""The maximum size of a text, in bytes."""


@dataclass(frozen=True)
class Planted:
    """The planted numbers of a text, as tensors on the CPU.

    Attributes:
        question: int64 [num_windows, num_tokens], the index of the planted number that a predicted token answers; -1
            for tokens that are not part of an answer.
        distance: int64 [num_windows, count], tokens between a planted number and its answer.
    """

    question: Tensor
    distance: Tensor


@dataclass(frozen=True)
class Text:
    """Windows of a text, and the metric of its loss.

    Attributes:
        source: the name of the file without its folder, because results are compared between machines.
        windows: int64 [num_windows, schedule.window_tokens].
        schedule: the steps in which a model reads a window.
        in_bytes: whether tokens are bytes.
        planted: the numbers that :func:`kvcompile.evaluation.recall.plant_numbers` has planted; None if there are none.
    """

    source: str
    windows: Tensor
    schedule: Schedule
    in_bytes: bool
    planted: Planted | None = None

    @property
    def inputs(self) -> Tensor:
        """The tokens that a model reads, int64 [num_windows, schedule.num_tokens]: all but the last of a window."""
        return self.windows[:, : self.schedule.num_tokens]

    @property
    def metric(self) -> str:
        return "bits per byte" if self.in_bytes else "perplexity"

    def quality(self, nats: float) -> float:
        """The metric for a mean loss of ``nats`` per token."""
        return nats / math.log(2) if self.in_bytes else math.exp(nats)

    def relative_change(self, nats: float, difference: float) -> float:
        """The relative increase of the metric if the mean loss grows from ``nats`` by ``difference``."""
        return difference / nats if self.in_bytes else math.expm1(difference)


def read_text(model: Any, model_name: str, path: Path | None, schedule: Schedule, num_windows: int) -> Text:
    """Windows that are spread evenly over a file.

    Args:
        model: the model. With a vocabulary of 256 its tokens are bytes; otherwise its tokenizer is loaded.
        model_name: the folder or hub name with the tokenizer, or with ``val.bin`` of a byte-level model.
        path: the file; by default ``val.bin``.
        schedule: the steps in which a window is read.
        num_windows: the number of windows.

    Raises:
        EvaluationError: there is no text, no tokenizer or too little text for the windows, or a window exceeds the
            model's context.
    """
    limit = getattr(text_config(model), "max_position_embeddings", None)
    if limit is not None and schedule.num_tokens > limit:
        raise EvaluationError(
            f"--prefill {schedule.prefill} and --decode {schedule.decode} make {schedule.num_tokens} tokens, but the "
            f"model reads at most {limit}; give smaller numbers"
        )
    path = text_path(model, model_name, path)
    try:
        data = read_file(path, MAX_TEXT)
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        raise EvaluationError(f"{cut(str(path))}: cannot be read: {cut(str(error))}") from None
    tokens = _tokens(data, model, model_name)
    if len(tokens) < schedule.window_tokens:
        raise EvaluationError(
            f"{path}: {len(tokens)} tokens, but a window takes {schedule.window_tokens}; give more text, or a smaller "
            "--prefill or --decode"
        )
    most = min(len(tokens) - schedule.window_tokens + 1, MAX_TOKENS // schedule.window_tokens)
    if num_windows > most:
        raise EvaluationError(
            f"--windows {num_windows}: {path.name} gives at most {most} different windows of {schedule.window_tokens} "
            "tokens; give a smaller number"
        )
    starts = torch.linspace(0, len(tokens) - schedule.window_tokens, num_windows).long()
    windows = tokens[starts[:, None] + torch.arange(schedule.window_tokens)].long()
    check_ids(windows, model, path.name)
    return Text(path.name, windows, schedule, reads_bytes(model))


def check_ids(ids: Tensor, model: Any, source: str) -> None:
    """Raise EvaluationError if the vocabulary of a model lacks a token id; ``source`` names the ids."""
    vocab_size = text_config(model).vocab_size
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.numel():
        raise EvaluationError(
            f"{source}: the token id {wrong[0].item()} is not among the {vocab_size} of the model, 0 to "
            f"{vocab_size - 1}; take the model's own tokenizer"
        )


def text_path(model: Any, model_name: str, path: Path | None) -> Path:
    """The file of :func:`read_text`; EvaluationError if no file is given and the model has no default text."""
    return path if path is not None else _held_out(model, model_name)


def _held_out(model: Any, model_name: str) -> Path:
    path = Path(model_name) / HELD_OUT
    if not reads_bytes(model):
        raise EvaluationError("the model has no default text: give one with --data FILE")
    if not path.is_file():
        raise EvaluationError(f"there is no {path}; give a text with --data FILE")
    return path


def _tokens(data: bytes, model: Any, model_name: str) -> Tensor:
    """The tokens of a text, uint8 or int64 [n]."""
    if reads_bytes(model):
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return torch.tensor(encoder(model, model_name)(data.decode("utf-8", errors="replace")), dtype=torch.int64)


def encoder(model: Any, model_name: str) -> Callable[[str], list[int]]:
    """The function from a string to its token ids; arguments as in :func:`read_text`.

    Raises:
        EvaluationError: there is no tokenizer.
    """
    if reads_bytes(model):
        return lambda string: list(string.encode())
    from transformers import AutoTokenizer

    try:
        where = {} if is_folder(Path(model_name)) else hub_arguments(model_name)
        tokenizer = AutoTokenizer.from_pretrained(model_name, **where)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise EvaluationError(f"--model {model_name}: no tokenizer: {first_line(error)}") from error
    return lambda string: tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
