"""The workloads of the benchmarks: shapes, packed caches of random data, our operators, and PyTorch's attention."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import kvcompile.kernels.ops  # noqa: F401
from kvcompile.benching.errors import BenchError
from kvcompile.benching.measuring import Timing, time_graph
from kvcompile.benching.random_bases import with_random_bases
from kvcompile.errors import shown
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, num_blocks
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.packing import pack_blocks, pack_tokens
from kvcompile.kernels.spec.residual import header_of
from kvcompile.passes.site import FormatPair
from kvcompile.policy.policy import Policy
from kvcompile.policy.presets import preset_names, resolve

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
MAX_ERROR = 1e-2
"""Largest relative L2 error of a result in bfloat16; a call with a larger error is not timed."""

_CHUNK_VALUES = 1 << 24


@dataclass(frozen=True)
class Shape:
    """The sizes of a decode step; ``context`` is the number of cached tokens."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape that ``text`` names: ``batch,heads/kv_heads,head_dim,context``, e.g. ``8,32/8,128,32768``.

        ``str(shape)`` returns such a text.

        Raises:
            BenchError: ``text`` is not a valid shape.
        """
        number = "([0-9]{1,15})"
        match = re.fullmatch(rf"\(?{number},{number}/{number},{number},{number}\)?", text.replace(" ", ""))
        shape = cls(*map(int, match.groups())) if match else None
        if shape is None or not all(dataclasses.astuple(shape)) or shape.num_heads % shape.num_kv_heads:
            raise BenchError(
                f"{shown(text)} is not batch,heads/kv_heads,head_dim,context with heads a multiple of kv_heads "
                f"(example: 8,32/8,128,32768)"
            )
        return shape

    def __str__(self) -> str:
        return f"({self.batch}, {self.num_heads}/{self.num_kv_heads}, {self.head_dim}, {self.context})"

    @property
    def plain_bytes(self) -> int:
        """Bytes of unpacked K and V in DTYPE."""
        return 2 * self.batch * self.num_kv_heads * self.context * self.head_dim * DTYPE.itemsize

    def query(self, q_len: int = 1) -> Tensor:
        """A random query, [batch, num_heads, q_len, head_dim]."""
        return torch.randn(self.batch, self.num_heads, q_len, self.head_dim, dtype=DTYPE, device=DEVICE)

    def key_and_value(self) -> tuple[Tensor, Tensor]:
        """Random K and V, each [batch, num_kv_heads, context, head_dim]."""
        size = (self.batch, self.num_kv_heads, self.context, self.head_dim)
        return torch.randn(size, dtype=DTYPE, device=DEVICE), torch.randn(size, dtype=DTYPE, device=DEVICE)


def parse_formats(name: str) -> tuple[str, FormatPair]:
    """The name of a preset or format, or of two (``KEYS+VALUES``), and its format pair.

    Raises:
        PolicyError: no preset or format is called ``name``, or these formats cannot be combined.
        BenchError: ``name`` is ``auto``.
    """
    keys, plus, values = name.partition("+")
    if plus:
        pair = Policy.load({"default": {"key": {"dtype": keys}, "value": {"dtype": values}}}).default.formats()
    else:
        pair = resolve(name)
    if pair is None:
        raise BenchError(f"{name!r} leaves the cache unpacked: there is no kernel to time; name a preset or format")
    return name, pair


def parse_fully_packed(name: str) -> tuple[str, FormatPair]:
    """:func:`parse_formats` for format pairs without exact blocks.

    Raises:
        PolicyError: no preset or format is called ``name``.
        BenchError: ``name`` is ``auto``, or its caches keep exact blocks.
    """
    _, pair = parse_formats(name)
    if keeps_tokens(pair):
        raise BenchError(f"{name!r} keeps recent tokens exact, which this benchmark does not time; name another format")
    return name, pair


def keeps_tokens(pair: FormatPair) -> bool:
    """Whether caches of these formats keep blocks of exact tokens."""
    return pair.residual("key", DTYPE) is not None or pair.residual("value", DTYPE) is not None


def default_formats() -> list[tuple[str, FormatPair]]:
    """``bfloat16`` and all presets, with their format pairs."""
    return [parse_formats(name) for name in ("bfloat16", *preset_names())]


def fully_packed_formats() -> list[tuple[str, FormatPair]]:
    """The :func:`default_formats` without exact blocks."""
    return [(name, pair) for name, pair in default_formats() if not keeps_tokens(pair)]


@dataclass(frozen=True)
class Caches:
    """Packed caches of one format pair for one shape; calibrated formats have random bases."""

    shape: Shape
    pair: FormatPair

    @functools.cached_property
    def layouts(self) -> tuple[PackedLayout, PackedLayout]:
        head_dim = self.shape.head_dim
        pair = with_random_bases(self.pair, self.shape.num_kv_heads, head_dim)
        return pair.layout("key", head_dim, DTYPE), pair.layout("value", head_dim, DTYPE)

    def nbytes(self, num_tokens: int) -> int:
        """Bytes of the blocks of K and V that hold ``num_tokens`` tokens of all sequences, metadata included."""
        heads = self.shape.batch * self.shape.num_kv_heads
        return num_blocks(num_tokens) * heads * sum(layout.block_bytes for layout in self.layouts)

    def random(self, count: int, step: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """``count`` caches of ``shape.context`` random tokens, (k_data, v_data) each.

        The caches are windows of one large cache that lie ``step`` tokens apart, by default side by side. Blocks are
        the outermost dimension of packed data, so a window has the strides and the alignment of a separate cache.
        Caches with exact blocks have a header and are separate tensors.
        """
        if keeps_tokens(self.pair):
            assert step is None
            return [(self._random_cache(keys), self._random_cache(values)) for keys, values in [self.layouts] * count]
        length = num_blocks(self.shape.context)
        step = length if step is None else num_blocks(step)
        blocks = (count - 1) * step + length
        keys, values = (self._random_data(layout, blocks) for layout in self.layouts)
        windows = [slice(i * step, i * step + length) for i in range(count)]
        return [(keys[window], values[window]) for window in windows]

    def _random_data(self, layout: PackedLayout, blocks: int) -> Tensor:
        """Packed data of normally distributed tokens, encoded in chunks that keep the temporaries small."""
        batch, heads = self.shape.batch, self.shape.num_kv_heads
        data = torch.empty((blocks, batch, heads, layout.block_bytes), dtype=torch.uint8, device=DEVICE)
        for chunk in data.split(max(1, _CHUNK_VALUES // (batch * heads * BLOCK_TOKENS * layout.head_dim))):
            x = torch.randn(batch, heads, len(chunk) * BLOCK_TOKENS, layout.head_dim, dtype=DTYPE, device=DEVICE)
            chunk.copy_(pack_tokens(layout, x))
        return data

    def _random_cache(self, layout: PackedLayout) -> Tensor:
        """Packed data of ``shape.context`` normally distributed tokens, with exact blocks if the layout has them."""
        shape = self.shape
        x = torch.randn(shape.batch, shape.num_kv_heads, shape.context, shape.head_dim, dtype=DTYPE, device=DEVICE)
        num_tokens = max(1, _CHUNK_VALUES // (x[:, :, :BLOCK_TOKENS].numel())) * BLOCK_TOKENS
        blocks = [pack_blocks(layout, chunk) for chunk in x.split(num_tokens, 2)]
        return torch.cat([header_of(layout, x), *blocks] if layout.residual else blocks)

    def attention(
        self,
        query: Tensor,
        k_data: Tensor,
        v_data: Tensor,
        mask: Tensor | None = None,
        kv_len: int | None = None,
        ranges: Tensor | None = None,
    ) -> Tensor:
        """The result of our attention operator, which all benchmarks call through this method.

        Args:
            query: [batch, num_heads, q_len, head_dim].
            k_data: packed keys.
            v_data: packed values.
            mask: as in ``kvcompile::attention``.
            kv_len: number of cached tokens; by default the whole context.
            ranges: the visible range of the mask, which compiled graphs compute once for all layers.
        """
        return torch.ops.kvcompile.attention(
            query,
            k_data,
            v_data,
            mask=mask,
            sinks=None,
            kv_len=self.shape.context if kv_len is None else kv_len,
            is_causal=False,
            scale=self.shape.head_dim**-0.5,
            softcap=0.0,
            k_format=self.layouts[0].spec,
            v_format=self.layouts[1].spec,
            v_head_dim=self.shape.head_dim,
            ranges=ranges,
        )

    def check_attention(
        self, query: Tensor, k_data: Tensor, v_data: Tensor, mask: Tensor | None = None, kv_len: int | None = None
    ) -> float:
        """The relative L2 error of our attention against the specification.

        Checks the first KV head of the first sequence and the last KV head of the last sequence. ``mask`` must be the
        same for all sequences and heads.

        Raises:
            ArithmeticError: the error is larger than MAX_ERROR.
        """
        out = self.attention(query, k_data, v_data, mask, kv_len)
        group = self.shape.num_heads // self.shape.num_kv_heads
        errors = []
        for sequence, head in ((0, 0), (self.shape.batch - 1, self.shape.num_kv_heads - 1)):
            part = slice(sequence, sequence + 1), slice(head * group, (head + 1) * group)
            k_part, v_part = (data[:, sequence : sequence + 1, head : head + 1] for data in (k_data, v_data))
            expected = attend(
                query[part].float(),
                k_part,
                v_part,
                *(layout.of_heads(head, 1) for layout in self.layouts),
                mask=None if mask is None else mask[:1, :1],
                kv_len=self.shape.context if kv_len is None else kv_len,
            )
            errors.append(relative_error(out[part], expected))
        return check(max(errors), f"attention on {self.pair} for {self.shape}")


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The L2 norm of the difference over the norm of ``expected``; NaN or infinite if an element is not finite."""
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def check(error: float, what: str, limit: float = MAX_ERROR) -> float:
    """``error``, if it is at most ``limit``.

    Raises:
        ArithmeticError: the error is larger, or NaN.
    """
    if not error <= limit:
        raise ArithmeticError(f"{what} is wrong: relative error {error:.2e} to the specification, limit {limit:.0e}")
    return error


SDPA_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sdpa(
    backend: str, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, folded: bool = False
) -> Tensor:
    """PyTorch's attention on a cache with fewer KV heads than query heads, without expanding it.

    Args:
        backend: one of SDPA_BACKENDS.
        query: [batch, num_heads, q_len, head_dim].
        key: [batch, num_kv_heads, kv_len, head_dim].
        value: as ``key``.
        is_causal: the last query sees all keys, the query before it all keys but the last, and so on.
        folded: pass the query heads of a KV head as query positions. Without a mask the result is the same.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    mask = causal_lower_right(q_len, kv_len) if is_causal and q_len < kv_len else None
    rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3]) if folded else query
    with sdpa_kernel(SDPA_BACKENDS[backend]):
        out = F.scaled_dot_product_attention(
            rows, key, value, mask, is_causal=is_causal and mask is None, enable_gqa=not folded
        )
    return out.reshape(query.shape)


def decode_sdpa_calls() -> dict[str, Callable[..., Tensor]]:
    """All ways to call PyTorch's attention for a decode step without a mask, by name."""
    return {
        name + (", folded" if folded else ""): functools.partial(sdpa, name, folded=folded)
        for name in SDPA_BACKENDS
        for folded in (False, True)
    }


def runnable(calls: dict[str, Callable[..., Tensor]], inputs: tuple[Any, ...]) -> dict[str, Callable[..., Tensor]]:
    """The ``calls`` that PyTorch can run on these inputs.

    Raises:
        BenchError: PyTorch can run none of the calls; the message says why.
    """
    found, refusals = {}, []
    for name, call in calls.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # every backend that rejects these inputs warns
                call(*inputs)
        except RuntimeError as error:
            refusals.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        found[name] = call
    if not found:
        raise BenchError(f"no backend of scaled_dot_product_attention runs here: {'; '.join(refusals)}")
    return found


def time_sdpa(calls: dict[str, Callable[..., Tensor]], inputs: Sequence[tuple[Any, ...]]) -> dict[str, Timing]:
    """Times on a CUDA device of the ``calls`` that PyTorch can run on these inputs, fastest first.

    Raises:
        BenchError: PyTorch can run none of the calls; the message says why.
    """
    timings = {name: time_graph(call, inputs) for name, call in runnable(calls, inputs[0]).items()}
    return dict(sorted(timings.items(), key=lambda item: item[1].seconds))
