"""The operators ``kvcompile::*``, which rewritten graphs call.

Plain-PyTorch functions specify the operators:

- ``store``: :func:`kvcompile.kernels.spec.packing.write_tokens_`. ``store_pair`` is two stores.
- ``attention``: :func:`kvcompile.kernels.spec.attention.attend`.
- ``attention_part``: :func:`kvcompile.kernels.spec.attention.attend_part`.
- ``visible_range``: :func:`kvcompile.kernels.tiles.visible_range.visible_range`.

These functions run on a CPU. Triton kernels that agree with them run on a GPU. No operator is differentiable.

``attention`` without ``v_data`` takes ``k_data`` as values, too. ``v_format`` and ``v_head_dim`` must then equal the
format and head_dim of keys, and ``new_keys`` are also the new values. New tokens need both their vectors and their
slots (:class:`kvcompile.kernels.spec.new_tokens.NewTokens`). ``paired_query`` and ``key_factors`` apply RoPE to
pre-RoPE keys (:class:`kvcompile.kernels.spec.key_factors.KeyFactors`).

Importing this module needs neither Triton nor a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from kvcompile.kernels import calibrated, launch
from kvcompile.kernels.deepseek_v4 import ops as deepseek_v4_ops  # noqa: F401 - defines more operators
from kvcompile.kernels.gather import ops as gather_ops  # noqa: F401 - defines more operators
from kvcompile.kernels.lang.recipes import Repeated
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Role
from kvcompile.kernels.spec.attention import attend, attend_part
from kvcompile.kernels.spec.key_factors import KeyFactors
from kvcompile.kernels.spec.new_tokens import NewTokens, reads_packed
from kvcompile.kernels.spec.packing import read_tokens, to_cache_dtype, write_tokens_
from kvcompile.kernels.spec.residual import blocks_of
from kvcompile.kernels.tiles.visible_range import visible_range, with_four_dimensions

_library = torch.library.Library("kvcompile", "DEF")
_library.define(
    "store(Tensor(a!) data, Tensor x, Tensor positions, Tensor? valid, str format, str role) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "store_pair(Tensor(a!) k_data, Tensor(b!) v_data, Tensor key, Tensor value, Tensor positions, Tensor? valid, "
    "str k_format, str v_format) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "attention(Tensor query, Tensor k_data, Tensor? v_data, Tensor? mask, Tensor? sinks, SymInt kv_len, "
    "bool is_causal, float scale, float softcap, str k_format, str v_format, SymInt v_head_dim, Tensor? ranges=None, "
    "Tensor? new_keys=None, Tensor? new_key_slots=None, Tensor? new_values=None, Tensor? new_value_slots=None, "
    "Tensor? paired_query=None, Tensor? key_factors=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "attention_part(Tensor query, Tensor k_data, Tensor? v_data, Tensor? mask, Tensor? sinks, SymInt kv_len, "
    "bool is_causal, float scale, float softcap, str k_format, str v_format, SymInt v_head_dim, Tensor? ranges=None) "
    "-> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "dequantize(Tensor data, SymInt num_tokens, ScalarType dtype, str format, str role, SymInt head_dim) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define("visible_range(Tensor mask, SymInt q_len, SymInt kv_len) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


def _layout_of(op: str, name: str, x: Tensor, format: str, role: str) -> PackedLayout:
    """The layout of a cache in ``format`` for vectors such as ``x``, [batch, heads, tokens, head_dim]."""
    if x.dim() != 4:
        raise ValueError(
            f"kvcompile::{op}: {name} must be [batch, heads, tokens, head_dim], but has the shape {list(x.shape)}"
        )
    return PackedLayout.parse(format, cast(Role, role), x.shape[3])


@functools.lru_cache(maxsize=4096)
def _check_data(
    op: str,
    name: str,
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    device: torch.device,
    layout: PackedLayout,
) -> None:
    """Raise ValueError unless a tensor can be packed data of ``layout``; kernels do not check it again."""
    if dtype != torch.uint8 or len(shape) != 4:
        raise ValueError(
            f"kvcompile::{op}: {name} must be uint8 [num_blocks, batch, num_kv_heads, block_bytes], "
            f"but is {dtype} {list(shape)}"
        )
    if shape[3] != layout.block_bytes:
        raise ValueError(
            f"kvcompile::{op}: {name} has blocks of {shape[3]} bytes, but {layout.spec} with head_dim "
            f"{layout.head_dim} has {layout.block_bytes}; pass the format and head_dim with which it was written"
        )
    if (reason := layout.unsupported_on(device)) is not None:
        raise ValueError(f"kvcompile::{op}: {name} in {layout.spec}: {reason}; keep this cache plain on a GPU")
    if layout.format.num_basis_heads not in (None, shape[2]):
        raise ValueError(
            f"kvcompile::{op}: {name} has {shape[2]} KV heads, but {layout.spec} was calibrated for "
            f"{layout.format.num_basis_heads}; calibrate it for this model"
        )
    if any(stride % BLOCK_TOKENS for stride in strides[:3]) or (strides[3] != 1 and any(strides)):
        raise ValueError(
            f"kvcompile::{op}: {name} has strides {strides}; blocks must be contiguous and start at multiples of "
            f"{BLOCK_TOKENS} bytes, unless the tensor is a reference, whose strides are 0"
        )


def _check_store(data: Tensor, x: Tensor, positions: Tensor, valid: Tensor | None, layout: PackedLayout) -> None:
    _check_data("store", "data", data.dtype, data.shape, data.stride(), data.device, layout)
    batch, num_kv_heads, num_tokens, _ = x.shape
    if not x.is_floating_point():
        raise ValueError(f"kvcompile::store: x must be floating point, but is {x.dtype}")
    if positions.dtype != torch.int64 or (valid is not None and valid.dtype != torch.bool):
        valid_is = "" if valid is None else f" and {valid.dtype}"
        raise ValueError(
            f"kvcompile::store: positions must be int64 and valid bool, but they are {positions.dtype}{valid_is}"
        )
    if data.shape[1:3] != x.shape[:2]:
        raise ValueError(
            f"kvcompile::store: data has batch and KV heads {list(data.shape[1:3])}, but x has {[batch, num_kv_heads]}"
        )
    for name, tensor in (("positions", positions), ("valid", valid)):
        if tensor is not None and tensor.shape not in ((num_tokens,), (batch, num_tokens)):
            raise ValueError(
                f"kvcompile::store: {name} must be [{num_tokens}] or [{batch}, {num_tokens}], one per token of x, but "
                f"is {list(tensor.shape)}"
            )


def _store(data: Tensor, x: Tensor, positions: Tensor, valid: Tensor | None, format: str, role: str) -> None:
    layout = _layout_of("store", "x", x, format, role)
    _check_store(data, x, positions, valid, layout)
    if data.is_cuda:
        calibrated.store(data, x, positions, valid, format, role)
    else:
        blocks = blocks_of(positions) if layout.residual is not None else None
        write_tokens_(data, layout, x, positions, valid, blocks)


def _store_fake(data: Tensor, x: Tensor, positions: Tensor, valid: Tensor | None, format: str, role: str) -> None:
    return None


def _store_pair(
    k_data: Tensor,
    v_data: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    valid: Tensor | None,
    k_format: str,
    v_format: str,
) -> None:
    _check_store(k_data, key, positions, valid, _layout_of("store_pair", "key", key, k_format, "key"))
    _check_store(v_data, value, positions, valid, _layout_of("store_pair", "value", value, v_format, "value"))
    if key.shape[:3] != value.shape[:3] or k_data.is_cuda != v_data.is_cuda:
        raise ValueError(
            f"kvcompile::store_pair: key {list(key.shape)} and value {list(value.shape)} must have the same batch, KV "
            f"heads and tokens, and be on one device"
        )
    if k_data.is_cuda:
        calibrated.store_pair(k_data, v_data, key, value, positions, valid, k_format, v_format)
    else:
        _store(k_data, key, positions, valid, k_format, "key")
        _store(v_data, value, positions, valid, v_format, "value")


def _store_pair_fake(
    k_data: Tensor,
    v_data: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    valid: Tensor | None,
    k_format: str,
    v_format: str,
) -> None:
    return None


def _check_attention(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor,
    sinks: Tensor | None,
    kv_len: int,
    key: PackedLayout,
    value: PackedLayout,
) -> None:
    for name, data, layout in (("k_data", k_data, key), ("v_data", v_data, value)):
        _check_data("attention", name, data.dtype, data.shape, data.stride(), data.device, layout)
    batch, num_heads = query.shape[:2]
    same_size = key.token_blocks(k_data) == value.token_blocks(v_data) and k_data.shape[1:3] == v_data.shape[1:3]
    if not same_size or k_data.shape[1] != batch or num_heads % k_data.shape[2]:
        raise ValueError(
            f"kvcompile::attention: query {list(query.shape)}, k_data {list(k_data.shape)} and v_data "
            f"{list(v_data.shape)} do not match: all need the same batch, k_data and v_data the same number of blocks "
            f"and KV heads, and query a multiple of the KV heads"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"kvcompile::attention: sinks must be [{num_heads}], one per head, but is {list(sinks.shape)}")
    capacity = key.token_blocks(k_data) * BLOCK_TOKENS
    if not 0 <= kv_len <= capacity:
        raise ValueError(f"kvcompile::attention: kv_len {kv_len} is not within the {capacity} tokens of the cache")


def _attention_layouts(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor | None,
    sinks: Tensor | None,
    kv_len: int,
    k_format: str,
    v_format: str,
    v_head_dim: int,
) -> tuple[PackedLayout, PackedLayout]:
    """The layouts of keys and values, after a check of all arguments."""
    key = _layout_of("attention", "query", query, k_format, "key")
    if v_data is None:
        if key.format.granularity == "channel":
            raise ValueError(f"kvcompile::attention: keys in {k_format} cannot serve as values; pass v_data")
        value = key
        if (v_format, v_head_dim) != (k_format, key.head_dim):
            raise ValueError(
                f"kvcompile::attention: without v_data the keys serve as values, so v_format and v_head_dim must be "
                f"{k_format} and {key.head_dim}, but are {v_format} and {v_head_dim}"
            )
    else:
        value = PackedLayout.parse(v_format, "value", v_head_dim)
    _check_attention(query, k_data, k_data if v_data is None else v_data, sinks, kv_len, key, value)
    return key, value


def _new_tokens(
    name: str, x: Tensor | None, slots: Tensor | None, data: Tensor, layout: PackedLayout, q_len: int
) -> NewTokens | None:
    """New keys or values after a check; None if there are none, or if they are read packed."""
    if x is None or slots is None:
        if x is not slots:
            raise ValueError(f"kvcompile::attention: new_{name}s and new_{name}_slots are given together or not at all")
        return None
    batch, num_kv_heads, n, head_dim = x.shape if x.dim() == 4 else (0,) * 4
    if (batch, num_kv_heads, head_dim) != (*data.shape[1:3], layout.head_dim) or not x.is_floating_point():
        raise ValueError(
            f"kvcompile::attention: new_{name}s must be floating point [{data.shape[1]}, {data.shape[2]}, n, "
            f"{layout.head_dim}], but are {x.dtype} {list(x.shape)}"
        )
    if slots.dtype != torch.int64 or slots.shape not in ((n,), (batch, n)):
        raise ValueError(
            f"kvcompile::attention: new_{name}_slots must be int64 [{n}] or [{batch}, {n}], one per token of "
            f"new_{name}s, but are {slots.dtype} {list(slots.shape)}"
        )
    if not layout.takes_new_tokens:
        raise ValueError(f"kvcompile::attention: a cache in {layout.spec} takes no new_{name}s; leave them out")
    return None if reads_packed(q_len) else NewTokens(x, slots)


def _key_factors(
    query: Tensor, paired: Tensor | None, factors: Tensor | None, kv_len: int, has_new_keys: bool
) -> KeyFactors | None:
    """The key factors after a check; None if there are none."""
    if paired is None or factors is None:
        if paired is not factors:
            raise ValueError("kvcompile::attention: paired_query and key_factors are given together or not at all")
        return None
    if paired.shape != query.shape or paired.dtype != query.dtype:
        raise ValueError(
            f"kvcompile::attention: paired_query must be {query.dtype} {list(query.shape)} as query is, but is "
            f"{paired.dtype} {list(paired.shape)}"
        )
    if factors.shape != (2, kv_len, query.shape[3]) or not factors.is_floating_point():
        raise ValueError(
            f"kvcompile::attention: key_factors must be floating point [2, {kv_len}, {query.shape[3]}], but are "
            f"{factors.dtype} {list(factors.shape)}"
        )
    if has_new_keys:
        raise ValueError("kvcompile::attention: give key_factors or new_keys, not both")
    return KeyFactors(paired, factors)


def _attention(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    kv_len: int,
    is_causal: bool,
    scale: float,
    softcap: float,
    k_format: str,
    v_format: str,
    v_head_dim: int,
    ranges: Tensor | None = None,
    new_keys: Tensor | None = None,
    new_key_slots: Tensor | None = None,
    new_values: Tensor | None = None,
    new_value_slots: Tensor | None = None,
    paired_query: Tensor | None = None,
    key_factors: Tensor | None = None,
) -> Tensor:
    key, value = _attention_layouts(query, k_data, v_data, sinks, kv_len, k_format, v_format, v_head_dim)
    of_keys = of_values = _new_tokens("key", new_keys, new_key_slots, k_data, key, query.shape[2])
    if v_data is not None:
        of_values = _new_tokens("value", new_values, new_value_slots, v_data, value, query.shape[2])
    elif new_values is not None or new_value_slots is not None:
        raise ValueError("kvcompile::attention: without v_data the keys serve as values; leave new_values out")
    factors = _key_factors(query, paired_query, key_factors, kv_len, of_keys is not None)
    if query.is_cuda:
        return calibrated.attention(
            query, k_data, v_data, mask, sinks, kv_len, is_causal, scale, softcap, k_format, v_format, v_head_dim,
            ranges, of_keys, of_values, factors,
        )  # fmt: skip
    return attend(
        query,
        k_data,
        k_data if v_data is None else v_data,
        key,
        value,
        mask=mask,
        sinks=sinks,
        kv_len=kv_len,
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        new_keys=of_keys,
        new_values=of_values,
        key_factors=factors,
    ).contiguous()


def _attention_fake(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    kv_len: int,
    is_causal: bool,
    scale: float,
    softcap: float,
    k_format: str,
    v_format: str,
    v_head_dim: int,
    ranges: Tensor | None = None,
    new_keys: Tensor | None = None,
    new_key_slots: Tensor | None = None,
    new_values: Tensor | None = None,
    new_value_slots: Tensor | None = None,
    paired_query: Tensor | None = None,
    key_factors: Tensor | None = None,
) -> Tensor:
    return query.new_empty((*query.shape[:3], v_head_dim))


def _attention_part(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    kv_len: int,
    is_causal: bool,
    scale: float,
    softcap: float,
    k_format: str,
    v_format: str,
    v_head_dim: int,
    ranges: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    key, value = _attention_layouts(query, k_data, v_data, sinks, kv_len, k_format, v_format, v_head_dim)
    if query.is_cuda:
        for layout in (key, value):
            if layout.format.is_calibrated:
                raise ValueError(
                    f"kvcompile::attention_part: no kernel reads a part of {layout.description}; use a format without "
                    "a calibration"
                )
        lse = query.new_empty((*query.shape[:3], 2), dtype=torch.float32)
        out = launch.attention(
            query, k_data, v_data, mask, sinks, kv_len, is_causal, scale, softcap, k_format, v_format, v_head_dim,
            ranges, lse,
        )  # fmt: skip
        return out, lse
    out, lse = attend_part(
        query,
        k_data,
        k_data if v_data is None else v_data,
        key,
        value,
        mask=mask,
        sinks=sinks,
        kv_len=kv_len,
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
    )
    return out.contiguous(), lse.contiguous()


def _attention_part_fake(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    kv_len: int,
    is_causal: bool,
    scale: float,
    softcap: float,
    k_format: str,
    v_format: str,
    v_head_dim: int,
    ranges: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = query.shape[:3]
    return tuple(query.new_empty((*shape, size), dtype=torch.float32) for size in (v_head_dim, 2))  # type: ignore[return-value]


def _dequantize(data: Tensor, num_tokens: int, dtype: torch.dtype, format: str, role: str, head_dim: int) -> Tensor:
    layout = PackedLayout.parse(format, cast(Role, role), head_dim)
    _check_data("dequantize", "data", data.dtype, data.shape, data.stride(), data.device, layout)
    capacity = layout.token_blocks(data) * BLOCK_TOKENS
    if not 0 <= num_tokens <= capacity:
        raise ValueError(f"kvcompile::dequantize: num_tokens {num_tokens} is not within the {capacity} tokens of data")
    if data.is_cuda and layout.format.has_levels:
        return calibrated.dequantize(data, num_tokens, dtype, format, cast(Role, role), head_dim)
    return to_cache_dtype(read_tokens(data, layout, num_tokens), dtype).contiguous()


def _dequantize_fake(
    data: Tensor, num_tokens: int, dtype: torch.dtype, format: str, role: str, head_dim: int
) -> Tensor:
    return data.new_empty((data.shape[1], data.shape[2], num_tokens, head_dim), dtype=dtype)


def _visible_range(mask: Tensor, q_len: int, kv_len: int) -> Tensor:
    mask = with_four_dimensions(mask, q_len, kv_len)
    if mask.is_cuda:
        return launch.visible_range(mask)
    return visible_range(mask)


def _visible_range_fake(mask: Tensor, q_len: int, kv_len: int) -> Tensor:
    return mask.new_empty((mask.shape[0] if mask.dim() == 4 else 1, q_len, 3), dtype=torch.int32)


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "store": (_store, _store_fake),
    "store_pair": (_store_pair, _store_pair_fake),
    "attention": (_attention, _attention_fake),
    "attention_part": (_attention_part, _attention_part_fake),
    "dequantize": (_dequantize, _dequantize_fake),
    "visible_range": (_visible_range, _visible_range_fake),
}
REPEATED = {name: Repeated(implementation) for name, (implementation, _) in _OPERATORS.items()}
"""Maps each operator of this file to the function that runs it on a GPU, and repeats its launches."""

for _name, (_implementation, _fake) in _OPERATORS.items():
    _library.impl(_name, _implementation, "CPU")
    _library.impl(_name, REPEATED[_name], "CUDA")
    torch.library.register_fake(f"kvcompile::{_name}", _fake, lib=_library)

IMPLEMENTATIONS = {
    getattr(torch.ops.kvcompile, name).default: implementation for name, (implementation, _) in _OPERATORS.items()
}
"""Maps each operator of this file to the function that runs it once, on any device."""
