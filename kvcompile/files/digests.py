"""Digests in the files of this project: of their tensors, of their header, and of the model that computed them.

Tensors have 128-bit XXH3 digests, because SHA-256 is no faster than a disk. XXH3 detects damage. It does not protect
against an attacker, who can replace a digest in the same file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from kvcompile.compat.modules import original_module
from kvcompile.compat.tensors import is_distributed

SAMPLES = 16
"""Number of elements that the fingerprint of a model reads from each parameter."""


def of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The XXH3 digest of each tensor, by name. Several threads compute them.

    A digest covers the name, dtype, shape and bytes, so that swapped tensors are detected.
    """
    with ThreadPoolExecutor() as pool:
        return dict(zip(tensors, pool.map(_of_tensor, tensors.items()), strict=True))


def of_header(header: Mapping[str, str]) -> str:
    """The SHA-256 digest of all entries of a header except ``digest``."""
    entries = {name: value for name, value in header.items() if name != "digest"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def of_model(model: nn.Module) -> str:
    """A fingerprint of a model: SHA-256 of its configuration, and of its parameters.

    It covers the name, shape and dtype of every parameter, and 16 elements of each. It thus distinguishes most
    fine-tuned models from their base model without reading all weights.

    The fingerprint of a distributed model is the fingerprint of the whole model. All its ranks must call this function
    at the same time, because they gather one parameter after the other.
    """
    digest, model = hashlib.sha256(), original_module(model)
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        digest.update(json.dumps(_lasting(config.to_dict()), sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(_description(name, parameter))
        if not parameter.is_meta:
            elements = _whole(parameter.detach()).reshape(-1)
            _update(digest, elements[:: max(elements.numel() // SAMPLES, 1)][:SAMPLES])
    return digest.hexdigest()


def _whole(parameter: Any) -> Tensor:
    """A parameter, gathered from all ranks if it is distributed: the data pointer of a distributed tensor is null."""
    with torch.no_grad():
        whole: Tensor = parameter.full_tensor() if is_distributed(parameter) else parameter
    return whole


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration that describe the model rather than its folder, release or backend."""
    passing = ("transformers_version", "use_cache")
    return {name: value for name, value in config.items() if name not in passing and not name.startswith("_")}


def _of_tensor(named: tuple[str, Tensor]) -> str:
    name, tensor = named
    digest = xxhash.xxh3_128(_description(name, tensor))
    _update(digest, tensor)
    return digest.hexdigest()


def _description(name: str, tensor: Tensor) -> bytes:
    return f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()


def _update(digest: Any, tensor: Tensor) -> None:
    """Add the bytes of a plain tensor to a digest of ``hashlib`` or ``xxhash``, which reads them without a copy."""
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() > 0:
        digest.update((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
