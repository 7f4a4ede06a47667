"""Shared by the commands that run a model: options and loading."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvcompile.evaluation.schedule import Schedule
    from kvcompile.evaluation.text import Text

Model = Annotated[str, typer.Option(metavar="PATH", help="A Hugging Face model: a folder, or a name on the hub.")]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy", metavar="POLICY", help="A preset or a file.  [default: $KVQUANT_POLICY, else int8_per_token_head]"
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Text to read.  [default: val.bin in the model's folder, if the model's tokens are bytes]"
    ),
]
Prefill = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens of the first step.")]
Decode = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens after the first step, read in chunks.")]
Chunk = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens of one later step.")]
Windows = Annotated[int, typer.Option(metavar="N", min=1, help="Windows of text, spread evenly over the file.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="[default: cuda if there is a GPU, else cpu]")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="float32, bfloat16 or float16.  [default: float32 on a CPU, else the checkpoint's]"
    ),
]


def load(
    model: str, data: Path | None, schedule: Schedule, windows: int, device: str | None, dtype: str | None
) -> tuple[Any, Text]:
    """The model, and the windows of text that it reads.

    Raises:
        EvaluationError: there is no such model, or no text for it.
        OSError: the text cannot be read.
    """
    from kvcompile.evaluation import models, text

    models.silence_transformers()
    subject = models.load_model(model, device, dtype)
    return subject, text.read_text(subject, model, data, schedule, windows)


def name_of(model: str) -> str:
    """The name of a model in results: its folder, or its name on the hub."""
    return Path(model).resolve().name if Path(model).exists() else model


def check_writable(*paths: Path | None) -> None:
    """Raise OSError if a file cannot be written, before a measurement that takes minutes."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if not os.access(path.parent, os.W_OK):
            raise FileNotFoundError(errno.ENOENT, "its folder does not exist or cannot be written", str(path))
