"""Ways to keep several caches in one tensor: functions for tests of stacks, and their references."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

LAYERS, BATCH, NUM_HEADS, NUM_KV_HEADS, MAX_LEN, HEAD_DIM = 2, 2, 4, 2, 140, 64
POLICY = "int8_per_token_head"

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Form:
    """A way in which a tensor holds caches.

    Attributes:
        dims: the stacked dimensions of the tensor.
        sizes: the sizes of these dimensions.
        role_axis: the position in ``dims`` of the dimension with keys at 0 and values at 1.
        axes: the axes of each cache.
    """

    dims: tuple[int, ...] = (0,)
    sizes: tuple[int, ...] = (2,)
    role_axis: int = 0
    axes: str = "bhtd"


FORMS: dict[Step, Form] = {}


def form(**how: Any) -> Callable[[Step], Step]:
    def remember(fn: Step) -> Step:
        FORMS[fn] = Form(**how)
        return fn

    return remember


def attend(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    mask = torch.arange(keys.shape[2], device=q.device) <= pos[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


@form()
def index_copy(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[0].index_copy_(2, pos, k), kv[1].index_copy_(2, pos, v)
    return attend(q, kv[0], kv[1], pos)


@form()
def assignment(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[0, :, :, pos], kv[-1, :, :, pos] = k, v
    return attend(q, kv[0], kv[1], pos)


@form()
def slices(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[0, :, :, 3 : 3 + k.shape[2]], _ = k, kv[1].narrow(2, 3, v.shape[2]).copy_(v)
    return attend(q, kv[0], kv[1], pos)


@form()
def unbound(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    keys, values = kv.unbind()
    keys[:, :, pos], values[:, :, pos] = k, v
    return attend(q, keys, values, pos)


@form(axes="bthd")
def tokens_before_heads(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[0][:, pos], kv[1][:, pos] = k.transpose(1, 2), v.transpose(1, 2)
    return attend(q, kv[0].transpose(1, 2), kv[1].transpose(1, 2), pos)


@form(dims=(4,))
def after_the_channels(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[..., 0].index_copy_(2, pos, k), kv[..., 1].index_copy_(2, pos, v)
    return attend(q, kv[..., 0], kv[..., 1], pos)


@form(dims=(0, 1), sizes=(LAYERS, 2), role_axis=1)
def by_layer(cache: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    for layer in range(LAYERS):
        cache[layer, 0, :, :, pos] = k * (layer + 1)
        cache[layer][1].index_copy_(2, pos, v)
        q = q + attend(q, cache[layer, 0], cache[layer, 1], pos)
    return q


@form(dims=(0, 1), sizes=(2, LAYERS))
def by_role(cache: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    for layer in range(LAYERS):
        keys, values = cache[:, layer]
        keys[:, :, pos] = k * (layer + 1)
        values[:, :, pos] = v
        q = q + attend(q, keys, values, pos)
    return q


@form()
def both_at_once(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, :, :, pos] = torch.stack([k, v])
    return attend(q, kv[0], kv[1], pos)


@form()
def both_by_index_copy(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv.index_copy_(3, pos, torch.cat([k[None], v[None]]))
    return attend(q, *kv.unbind(), pos)


@form()
def both_by_slice(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv.narrow(3, 3, k.shape[2]).copy_(torch.stack([k, v]))
    keys, values = kv.chunk(2)
    return attend(q, keys.squeeze(0), values[0], pos)


@form()
def both_at_one_token(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, :, :, 3] = torch.stack([k, v])[..., -1, :]
    keys, values = kv.split(1)
    return attend(q, keys[0], values[0], pos)


@form()
def both_masked(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    here = torch.arange(kv.shape[3]) == pos[0]
    kv.copy_(torch.where(here[:, None], torch.stack([k, v])[:, :, :, :1], kv))
    return attend(q, kv[0], kv[1], pos)


@form()
def copied_back(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    keys, values = kv[0].index_copy(2, pos, k), kv[1].index_copy(2, pos, v)
    kv.copy_(torch.stack([keys, values]))
    return attend(q, kv[0], kv[1], pos)


@form()
def one_for_both(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, :, :, pos] = k + v
    return attend(q, kv[0], kv[1], pos)


@form(dims=(1,))
def sequences_before_roles(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, 0, :, pos], kv[:, 1, :, pos] = k, v
    return attend(q, kv[:, 0], kv[..., 1, :, :, :], pos)


@form(dims=(1,))
def sequences_before_roles_at_once(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, :, :, pos] = torch.stack([k, v], 1)
    return attend(q, *kv.unbind(1), pos)


@form(dims=(2,), axes="bthd")
def roles_within_tokens(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos] = torch.stack([k, v], 2).permute(0, 3, 2, 1, 4)
    return attend(q, *kv.permute(2, 0, 3, 1, 4), pos)


@form(dims=(3,), axes="bthd")
def roles_within_heads(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    per_sequence = torch.arange(kv.shape[0], device=q.device)[:, None]
    kv[per_sequence, pos.expand(len(per_sequence), -1)] = torch.stack([k, v], -2).transpose(1, 2)
    return attend(q, kv[..., 0, :].transpose(1, 2), kv[..., 1, :].transpose(1, 2), pos)


@form(dims=(0, 2), sizes=(LAYERS, 2), role_axis=1)
def by_layer_and_sequence(cache: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    for layer in range(LAYERS):
        cache[layer, :, :, :, pos] = torch.stack([k * (layer + 1), v], 1)
        q = q + attend(q, cache[layer, :, 0], cache[layer, :, 1], pos)
    return q


@form(dims=(0, 1), sizes=(2, LAYERS))
def all_layers_at_once(cache: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    new = torch.stack([torch.stack([k, k * 2]), torch.stack([v, v + 1])])
    cache[..., pos, :] = new
    for layer in range(LAYERS):
        q = q + attend(q, *cache.transpose(0, 1)[layer], pos)
    return q


def packed_parts(fn: Step, preset: str = POLICY) -> dict[tuple[int, ...], tuple[PackedLayout, str]]:
    """The layout and the axes of each part of ``fn``'s stack, by the index of the part."""
    how = FORMS[fn]
    formats = Policy.load(preset).formats_for("", 0, 1)
    assert formats is not None
    layouts = [formats.layout(role, HEAD_DIM, torch.float32) for role in ("key", "value")]
    return {part: (layouts[part[how.role_axis]], how.axes) for part in itertools.product(*map(range, how.sizes))}


def packed_stack(fn: Step, plain: Tensor, preset: str = POLICY) -> PackedStack:
    return PackedStack.from_dense(plain, packed_parts(fn, preset), FORMS[fn].dims)


def plain_stack(fn: Step) -> Tensor:
    how = FORMS[fn]
    sizes = {"b": BATCH, "h": NUM_KV_HEADS, "t": MAX_LEN, "d": HEAD_DIM}
    size = [sizes[axis] for axis in how.axes]
    for dim, extent in zip(how.dims, how.sizes, strict=True):
        size.insert(dim, extent)
    return torch.randn(size)


def inputs(n: int, begin: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, values and positions of ``n`` new tokens."""
    q, k, v = (
        torch.randn(BATCH, heads, n, HEAD_DIM, device=device) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    return q, k, v, torch.arange(begin, begin + n, device=device)


def compiled(fn: Callable[..., Any], policy: Any = POLICY, on_unsupported: str = "error", **how: Any) -> Any:
    """``fn`` under ``torch.compile``, with further arguments in ``how``."""
    torch._dynamo.reset()
    options = {"policy": reading_packed(policy), "on_unsupported": on_unsupported}
    return torch.compile(fn, backend="kvquant", fullgraph=True, options=options, **how)


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert (out - expected).norm() < 1e-3 * expected.norm()


def plain(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, (PackedStack, PackedTensor)) else x


SAVE_AND_LOAD = {"torch.save": (torch.save, torch.load), "save_cache": (kvcompile.save_cache, kvcompile.load_cache)}
save_and_load = pytest.mark.parametrize(("save", "load"), SAVE_AND_LOAD.values(), ids=SAVE_AND_LOAD.keys())


def check_is_saved_and_loaded(
    stack: PackedStack, expected: Tensor, save: Callable[..., None], load: Callable[..., Any], path: Path
) -> None:
    """Assert that a stack that is saved under two names loads as one stack with equal parts and values."""
    save({"cache": stack, "again": stack}, path)
    loaded = load(path)
    assert loaded["cache"] is loaded["again"]
    assert type(loaded["cache"]) is type(stack)
    assert [type(part) for part in loaded["cache"].parts] == [type(part) for part in stack.parts]
    assert torch.equal(loaded["cache"].dequantize(), expected)
