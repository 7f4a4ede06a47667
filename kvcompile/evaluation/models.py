"""Models from a folder or the Hugging Face hub, or with random weights from a config."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcompile.compat.modules import is_compiled_in_place, original_module
from kvcompile.errors import KVCompileError, cut, did_you_mean, one_line
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.hub import check_hub_name, hub_failure
from kvcompile.files.reading import MAX_CONFIG, check_file, is_folder, is_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")

MAX_LAYERS = 1000
"""The maximum number of layers of a model with random weights."""


def silence_transformers() -> None:
    """Switch off the progress bars and the advice of Transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_model(name: str, device: str | None = None, dtype: str | None = None) -> PreTrainedModel:
    """A causal language model, ready for inference.

    Args:
        name: a folder with a Hugging Face model, or its name on the hub.
        device: the device of the model; by default a GPU if there is one.
        dtype: the dtype of the weights and the cache; by default float32 on a CPU, otherwise the checkpoint's dtype.

    Raises:
        EvaluationError: there is no such model, device or dtype.
    """
    place = find_device(device)
    found = _dtype(dtype, place)
    if is_path(Path(name)) and not is_folder(Path(name)):
        raise EvaluationError(
            f"--model {cut(name)}: it is a file, and a model needs weights; give the folder that has the model's "
            "config.json and weights, or its name on the Hugging Face hub"
        )
    with _files_of(name) as where:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(name, dtype=found, **where)
    return model.eval().to(place)


def random_model(
    name: str, num_layers: int | None = None, device: str | None = None, dtype: str | None = None
) -> PreTrainedModel:
    """A causal language model with random weights, made from its config.

    Args:
        name: a ``config.json``, a folder that has one, or a name on the hub.
        num_layers: the number of layers to keep, from the first; None keeps all.
        device: the device of the model; by default a GPU if there is one.
        dtype: the dtype of the weights; by default float32 on a CPU, otherwise the config's dtype.

    Raises:
        EvaluationError: there is no such config, device or dtype, or the config has fewer layers.
    """
    place = find_device(device)
    found = _dtype(dtype, place)
    with _files_of(name) as where:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(name, **where)
        text = config.get_text_config(decoder=True)
        if num_layers is not None:
            _keep_layers(text, num_layers)
        if text.num_hidden_layers > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers: expected at most {MAX_LAYERS}, got {text.num_hidden_layers}")
    if found == "auto":
        found = getattr(config, "dtype", None) or "float32"
    with _mistakes_named(name), place:
        return AutoModelForCausalLM.from_config(config, dtype=found).eval()


def has_weights(name: str) -> bool:
    """Whether a name is a folder with weights, or is not a local path and may be on the hub."""
    path = Path(name)
    if path.is_dir():
        return any(path.glob(pattern) for pattern in ("*.safetensors", "*.bin"))
    return not path.exists()


@contextlib.contextmanager
def _files_of(name: str) -> Iterator[dict[str, Any]]:
    """The arguments of ``from_pretrained`` that say where the files of a model are.

    Raises:
        EvaluationError: Transformers cannot find or read them, or the block raises an error.
    """
    with _mistakes_named(name):
        failure = hub_failure(name) if _is_on_hub(name) else ""
        if not failure:
            yield {}
            return
        try:
            yield {"local_files_only": True}
        except OSError as error:
            raise OSError(
                "no such folder, not among the files downloaded before, and the Hugging Face hub does not answer "
                f"({one_line(failure)}); give a model's folder"
            ) from error


def _is_on_hub(name: str) -> bool:
    """Whether a name belongs to a model on the hub; OSError if it is a path without a model or config."""
    if name.endswith(".json"):
        check_file(Path(name), MAX_CONFIG)
    elif is_folder(Path(name)):
        return False
    elif is_path(Path(name)):
        raise OSError("it is neither a folder nor a .json file; give a folder with a model, or its config.json")
    elif name.startswith((".", "/", "~")):
        raise OSError("no such folder; give a folder with a model, or its name on the Hugging Face hub")
    else:
        check_hub_name(name)
        return True
    return False


def _keep_layers(config: Any, num_layers: int) -> None:
    """Keep only the first layers, in all fields that list the layers."""
    total = config.num_hidden_layers
    if num_layers > total:
        raise EvaluationError(f"--layers {num_layers}: the model has {total} layers; give at most {total}")
    for field, value in vars(config).items():
        if isinstance(value, list) and len(value) == total:
            setattr(config, field, value[:num_layers])
    config.num_hidden_layers = num_layers


def _dtype(dtype: str | None, place: torch.device) -> str:
    """The dtype for ``from_pretrained``; EvaluationError if ``dtype`` is not valid."""
    if dtype is not None and dtype not in DTYPES:
        raise EvaluationError(
            f"--dtype: {dtype!r} is not a valid dtype{did_you_mean(dtype, DTYPES)} (write one of {', '.join(DTYPES)})"
        )
    return dtype or ("float32" if place.type == "cpu" else "auto")


@contextlib.contextmanager
def _mistakes_named(name: str) -> Iterator[None]:
    """Turn the errors that Transformers raises about a model into EvaluationErrors that name the model."""
    try:
        yield
    except KVCompileError:
        raise
    except Exception as error:  # wrong numbers in a config may raise any error
        raise EvaluationError(f"--model {cut(name)}: {first_line(error)}") from error


def find_device(device: str | None) -> torch.device:
    """The device called ``device``; for None a GPU if there is one. EvaluationError if it does not exist."""
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise EvaluationError(f"--device {device}: {first_line(error)}") from error
    return place


def uncompiled(model: Any) -> Any:
    """The uncompiled model: the model itself, or an uncompiled copy with the same submodules."""
    model = original_module(model)
    # The copy shares everything with the module except the result of Module.compile().
    return copy.copy(model) if is_compiled_in_place(model) else model


def text_config(model: Any) -> Any:
    """The part of a model's config that describes its language model."""
    return model.config.get_text_config(decoder=True)


def reads_bytes(model: Any) -> bool:
    """Whether the model's tokens are bytes, which is so if its vocabulary has 256 entries."""
    return text_config(model).vocab_size == 256


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with its type if the message alone says nothing."""
    lines = [*(line.strip() for line in str(error).strip().splitlines()), "", ""]
    line = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__} {line}".strip() if isinstance(error, LookupError) or not line else line
