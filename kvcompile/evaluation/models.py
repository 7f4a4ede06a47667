"""Loads models, from a folder or the Hugging Face hub, or makes them from a config with random weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
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

    place = find_device(device)
    found = _dtype(dtype, place)
    with _mistakes_named(name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=found)
    return model.eval().to(place)


def random_model(
    name: str, num_layers: int | None = None, device: str | None = None, dtype: str | None = None
) -> PreTrainedModel:
    """A causal language model with random weights, made from its config.

    Args:
        name: a ``config.json``, a folder that has one, or a name on the hub.
        num_layers: so many layers, the first ones, instead of all.
        device: where it is made; by default a GPU if there is one.
        dtype: of its weights; by default float32 on a CPU, elsewhere the config's.

    Raises:
        EvaluationError: there is no such config, device or dtype, or it has fewer layers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if name.endswith(".json") and not Path(name).is_file():
        raise EvaluationError(f"--model {name}: no such file")
    place = find_device(device)
    found = _dtype(dtype, place)
    with _mistakes_named(name):
        config = AutoConfig.from_pretrained(name)
    if num_layers is not None:
        _keep_layers(config.get_text_config(decoder=True), num_layers)
    if found == "auto":
        found = getattr(config, "dtype", None) or "float32"
    with _mistakes_named(name), place:
        return AutoModelForCausalLM.from_config(config, dtype=found).eval()


def has_weights(name: str) -> bool:
    """Whether a name is a folder with weights, or none of this machine: then it may be on the hub."""
    path = Path(name)
    if path.is_dir():
        return any(path.glob(pattern) for pattern in ("*.safetensors", "*.bin"))
    return not path.exists()


def _keep_layers(config: Any, num_layers: int) -> None:
    """Leave the first layers, in all fields that list the layers."""
    total = config.num_hidden_layers
    if num_layers > total:
        raise EvaluationError(f"--layers {num_layers}: the model has {total}")
    for field, value in vars(config).items():
        if isinstance(value, list) and len(value) == total:
            setattr(config, field, value[:num_layers])
    config.num_hidden_layers = num_layers


def _dtype(dtype: str | None, place: torch.device) -> str:
    """What ``from_pretrained`` takes; EvaluationError if it is none."""
    if dtype is not None and dtype not in DTYPES:
        raise EvaluationError(f"--dtype: {dtype!r} is none of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES)}")
    return dtype or ("float32" if place.type == "cpu" else "auto")


@contextlib.contextmanager
def _mistakes_named(name: str) -> Iterator[None]:
    """What Transformers raises for a model that it cannot make, as an error that names the model."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise EvaluationError(f"--model {name}: {first_line(error)}") from error


def find_device(device: str | None) -> torch.device:
    """The device of a name; a GPU if there is one for None. EvaluationError if it does not exist."""
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise EvaluationError(f"--device {device}: {first_line(error)}") from error
    return place


def uncompiled(model: Any) -> Any:
    """The model, and if it was compiled another with the same submodules and parameters, which is not."""
    model = getattr(model, "_orig_mod", model)
    # A copy of a module has all that the module has but what Module.compile() made.
    return copy.copy(model) if getattr(model, "_compiled_call_impl", None) is not None else model


def running_eagerly() -> contextlib.AbstractContextManager[None]:
    """In the block nothing compiled runs as such, not even submodules that were compiled by themselves."""
    return torch.compiler.set_stance("force_eager")


def text_config(model: Any) -> Any:
    """The part of a model's config that describes its language model."""
    return model.config.get_text_config(decoder=True)


def reads_bytes(model: Any) -> bool:
    """Whether the model's tokens are bytes: its vocabulary has 256 entries."""
    return text_config(model).vocab_size == 256


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
