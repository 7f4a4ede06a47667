"""The kinds of files that users get from others: how a valid one is written, and how it is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import DynamicCache
from valid_files import CONFIG, POLICY

import kvcompile
from kvcompile.errors import CacheFileError, PolicyError
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.text import Text, read_text
from kvcompile.files import digests
from kvcompile.kernels.formats import bases, get_format
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.planning.config_file import read_config
from kvcompile.planning.errors import PlanError
from kvcompile.planning.model_caches import read_model_caches
from kvcompile.policy.policy import MAX_FAULTS, Policy
from kvcompile.policy.static_scales import StaticScales
from kvcompile.policy.transforms import Origin, Transforms

FIXED_NAMES = (
    "", "key", "value", "float16", "bfloat16", "int64", "bool", "complex64", "bhtd", "bthd", "btd", "bhhd", "dhtb",
    "int8_per_token_head", "int4_per_channel", "int4_per_channel[recent=1,sinks=0,float16]", "fp8_ds_mla",
    "int8_per_token_head[recent=99999999999,sinks=0,float16]", "turboquant_4bit_mean", "auto", "keys", "cache",
    "tensor", "packed", "stack", "pool", "list", "dict", "object", "class", "DynamicCache", "F64", "U8", "C64", "\0",
    "x" * 300,
)  # fmt: skip
"""Words that have a meaning in one of the files."""

MODULE = "model.layers.0.self_attn"
_LARGEST = {"version": 1, "largest": {f"model.layers.{i}.self_attn": {"key": 12.5, "value": 1.75} for i in range(2)}}

Tree = Any
Change = Callable[[Tree], Tree]


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        write: writes a valid file.
        read: reads a file as kvcompile does, and returns its content.
        error: the error of a file that is not valid.
        suffix: the end of the file's name.
        edit_tree: the content of a file whose JSON is changed, with digests that fit; None for text.
        fault: takes a result, and whether digests fit the changed file; returns the fault as text, or an empty text.
        most_lines: the largest number of lines of a message.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    error: type[Exception]
    suffix: str
    edit_tree: Callable[[bytes, Change], bytes] | None = None
    fault: Callable[[Any, bool], str] = lambda result, signed: ""
    most_lines: int = 1


def _edit_json(content: bytes, change: Change) -> bytes:
    return json.dumps(change(json.loads(content))).encode("utf-8", "surrogatepass")


def _edit_safetensors(content: bytes, change: Change) -> bytes:
    """Change the header, in which entries of the metadata that are JSON are trees, and renew its digests."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = {name: _parsed(text) for name, text in sorted(header.pop("__metadata__", {}).items())}
    changed = change({"tensors": dict(sorted(header.items())), "metadata": metadata})  # safetensors has no order
    changed = changed if isinstance(changed, dict) else {}
    tensors, metadata = changed.get("tensors"), changed.get("metadata")
    data = content[8 + size :]
    if isinstance(metadata, dict):
        metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}
        metadata = _signed(tensors, metadata, data)
    whole = json.dumps({"__metadata__": metadata, **(tensors if isinstance(tensors, dict) else {})}).encode()
    return struct.pack("<Q", len(whole)) + whole + data


def _parsed(text: str) -> Any:
    return json.loads(text) if text[:1] in "{[" else text


def _signed(tensors: Any, metadata: dict[str, str], data: bytes) -> dict[str, str]:
    header = json.dumps(tensors).encode()
    try:
        found = digests.of_tensors(load(struct.pack("<Q", len(header)) + header + data))
    except (SafetensorError, TypeError, KeyError, ValueError, AttributeError, RuntimeError):
        found = None
    if found is not None and "digests" in metadata and metadata["digests"][:1] == "{":
        metadata["digests"] = json.dumps(found)
    return {**metadata, "digest": digests.of_header(metadata)} if "digest" in metadata else metadata


def _write_cache(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 70, 64, generator=generator).half()
    layouts = (
        PackedLayout.parse("int4_per_channel[recent=1,sinks=0,float16]", "key", 64),
        PackedLayout("int8_per_token_head", "value", 64),
    )
    keys, values = (PackedTensor.from_dense(x, layout) for layout in layouts)
    stack = PackedStack.of_parts([values, values.clone()], (2,), (0,))
    pool = PackedPool.from_dense(x[0, :, :64].reshape(4, 16, 3, 64), layouts[1])
    caches = {"keys": keys, "values": values, "view": values[:, 1:, 3:], "stack": stack, "pool": pool}
    turned = values.clone().with_stride(x.transpose(1, 2).contiguous().transpose(1, 2).stride())
    plain = {"plain": x[0, 0], "turned plain": x[0, 0].t()}
    kvcompile.save_cache({**caches, "turned": turned, **plain, "length": 70}, path)


def _write_hugging_face_cache(path: Path) -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    kvcompile.save_cache(cache, path)


def _hugging_face_cache_fault(result: Any, signed: bool) -> str:
    if signed:
        return ""
    (layer,) = result.layers
    same = layer.keys.eq(1).all() and layer.values.eq(0).all() and layer.keys.shape == (1, 2, 3, 16)
    return "" if same else "its content has changed"


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _cache_fault(result: Any, signed: bool) -> str:
    """The fault of a cache that was read, as text; empty without a fault.

    A packed tensor must be dequantized to its own shape and dtype. Unless digests are new, the content must be the old
    content.
    """
    for leaf in _leaves(result):
        if isinstance(leaf, PackedSubclass):
            plain = leaf.dequantize()
            if plain.shape != leaf.shape or plain.dtype != leaf.dtype:
                return f"{leaf.shape} {leaf.dtype} is dequantized to {plain.shape} {plain.dtype}"
            leaf.clone()
    if signed:
        return ""
    expected = _expected_cache()
    same = isinstance(result, dict) and list(result) == list(expected)
    return "" if same and all(map(_equal, _leaves(result), _leaves(expected))) else "its content has changed"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.stride() != other.stride():
        return False
    if isinstance(one, PackedTensor) and isinstance(other, PackedTensor):
        return one.cache_meta == other.cache_meta and torch.equal(one.packed, other.packed)
    if isinstance(one, PackedSubclass) and isinstance(other, PackedSubclass):
        return type(one) is type(other) and torch.equal(one.dequantize(), other.dequantize())
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


_EXPECTED: list[Any] = []


def _expected_cache() -> Any:
    if not _EXPECTED:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _write_cache(path := Path(folder, "cache"))
            _EXPECTED.append(kvcompile.load_cache(path))
    return _EXPECTED[0]


def _read_policy(path: Path) -> Any:
    policy = Policy.load(path)
    return [policy.formats_for(f"model.layers.{layer}.self_attn", layer, 4) for layer in range(4)]


def _read_scales(path: Path) -> Any:
    scales = StaticScales.read(path)
    return [scales.scaled(get_format("fp8_e4m3_unit"), role, MODULE, 0).name for role in ("key", "value")]


def _scales_fault(result: Any, signed: bool) -> str:
    numbers = [get_format(name).static_scale for name in result]
    return "" if all(0 < number < float("inf") for number in numbers) else f"scales are {numbers}"


def _write_scale_tensors(path: Path) -> None:
    path.write_bytes(save({f"{MODULE}.k_scale": torch.tensor(0.5), f"{MODULE}.v_scale": torch.tensor([0.25])}))


def _write_transforms(path: Path) -> None:
    origin = Origin(model="m", fingerprint="", text="t", text_digest="", windows=1, tokens=2, positions=(0, 1))
    eye, mean = torch.eye(16).expand(2, 16, 16).contiguous(), torch.ones(2, 16)
    parts = {"mean": mean, "to_stored": eye, "from_stored": eye.clone()}
    tensors = {f"{MODULE}.{role}.{part}": x.clone() for role in ("key", "value") for part, x in parts.items()}
    Transforms(str(path), origin, tensors).save(path)


def _read_transforms(path: Path) -> Any:
    transforms = Transforms.read(path)
    formats = [get_format("turboquant_4bit_mean"), get_format("transform_4321")]
    return [transforms.calibrated(fmt, role, MODULE, 0) for fmt in formats for role in ("key", "value")]


def _transforms_fault(result: Any, signed: bool) -> str:
    for fmt in result:
        x = torch.ones(1, bases.find(fmt.basis).num_heads, 2, bases.find(fmt.basis).head_dim)
        if not fmt.decode(fmt.encode(x)).isfinite().all():
            return f"{fmt.name} gives numbers that are not finite"
    return ""


_MODEL = SimpleNamespace(config=SimpleNamespace(vocab_size=256, max_position_embeddings=64))
_MODEL.config.get_text_config = lambda **_: _MODEL.config


def _read_tokens(path: Path) -> Text:
    return read_text(_MODEL, "model", path, Schedule(4, 4), 2)


def _tokens_fault(result: Text, signed: bool) -> str:
    windows = result.windows
    right = windows.shape == (2, result.schedule.window_tokens) and windows.min() >= 0 and windows.max() < 256
    return "" if right else f"windows are {windows}"


KINDS = {
    "policy": Kind(lambda path: path.write_text(POLICY), _read_policy, PolicyError, ".yaml", most_lines=MAX_FAULTS + 2),
    "config": Kind(
        lambda path: path.write_text(json.dumps(CONFIG)), lambda path: read_model_caches(read_config(path)), PlanError,
        ".json", _edit_json,
    ),
    "cache": Kind(_write_cache, kvcompile.load_cache, CacheFileError, ".safetensors", _edit_safetensors, _cache_fault),
    "cache of Transformers": Kind(
        _write_hugging_face_cache, kvcompile.load_cache, CacheFileError, ".safetensors", _edit_safetensors,
        _hugging_face_cache_fault,
    ),
    "calibration": Kind(
        lambda path: path.write_text(json.dumps(_LARGEST)), _read_scales, PolicyError, ".json", _edit_json,
        _scales_fault,
    ),
    "scales": Kind(
        _write_scale_tensors, _read_scales, PolicyError, ".safetensors", _edit_safetensors, _scales_fault
    ),
    "transforms": Kind(
        _write_transforms, _read_transforms, PolicyError, ".safetensors", _edit_safetensors, _transforms_fault
    ),
    "tokens": Kind(lambda path: path.write_bytes(bytes(range(32))), _read_tokens, EvaluationError, ".bin",
                   fault=_tokens_fault),
}  # fmt: skip
