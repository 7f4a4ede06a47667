"""Loads the model to be evaluated, from a folder or the Hugging Face hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcompile.errors import did_you_mean
from kvcompile.evaluation.errors import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")


def silence_transformers() -> None:
    """Its progress bars and advice are about other things than the evaluation."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_model(name: str, device: str | None = None, dtype: str | None = None) -> PreTrainedModel:
    """A causal language model, ready for inference.

    Args:
        name: a folder with a Hugging Face model, or its name on the hub.
        device: where it runs; by default a GPU if there is one.
        dtype: of its weights and its cache; by default float32 on a CPU, elsewhere the checkpoint's.

    Raises:
        EvaluationError: there is no such model, device or dtype.
    """
    from transformers import AutoModelForCausalLM

    if dtype is not None and dtype not in DTYPES:
        raise EvaluationError(f"--dtype: {dtype!r} is none of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES)}")
    place = find_device(device)
    if dtype is None:
        dtype = "float32" if place.type == "cpu" else "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise EvaluationError(f"--model {name}: {first_line(error)}") from error
    return model.eval().to(place)


def find_device(device: str | None) -> torch.device:
    """The device of a name; a GPU if there is one for None. EvaluationError if it does not exist."""
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise EvaluationError(f"--device {device}: {first_line(error)}") from error
    return place


def text_config(model: Any) -> Any:
    """The part of a model's config that describes its language model."""
    return model.config.get_text_config(decoder=True)


def reads_bytes(model: Any) -> bool:
    """Whether the model's tokens are bytes: its vocabulary has 256 entries."""
    return text_config(model).vocab_size == 256


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
