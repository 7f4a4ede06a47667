"""One attention site: its place in the model, the decision of the passes, and the reason of a refusal."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.kernels.formats import get_format
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual, Role, num_blocks
from kvcompile.passes.refusal import Reason, Refusal


@dataclass(frozen=True)
class FormatPair:
    """The formats of one layer's cache.

    Attributes:
        key: registry name of the format of keys.
        value: registry name of the format of values.
        residual_length: number of recent tokens in full precision, rounded up to whole blocks. Keys whose scales are
            per channel keep at least one block.
        sink_tokens: number of first tokens in full precision, rounded up to whole blocks.
    """

    key: str
    value: str
    residual_length: int = 0
    sink_tokens: int = 0

    def format_name(self, role: Role) -> str:
        return self.key if role == "key" else self.value

    def residual(self, role: Role, dtype: torch.dtype) -> Residual | None:
        """The tokens that keys or values of a cache of ``dtype`` keep in full precision; None if they keep no token."""
        recent_blocks, sink_blocks = num_blocks(self.residual_length), num_blocks(self.sink_tokens)
        if get_format(self.format_name(role)).granularity == "channel":
            recent_blocks = max(recent_blocks, 1)
        return Residual(sink_blocks, recent_blocks, dtype) if recent_blocks + sink_blocks else None

    @functools.cache  # noqa: B019 - pairs are few; equal layouts are one object, which guards compare fast
    def layout(self, role: Role, head_dim: int, dtype: torch.dtype) -> PackedLayout:
        """The layout of keys or values of a cache of ``dtype``."""
        return PackedLayout(self.format_name(role), role, head_dim, self.residual(role, dtype))


@dataclass(frozen=True)
class CacheSummary:
    """One cache tensor of a rewritten site.

    Attributes:
        role: ``key`` or ``value``.
        kind: ``static`` (a buffer that arrives and is mutated), ``functional`` (a buffer that arrives and is returned
            with new tokens, out of place), ``allocated`` (a buffer made inside the graph), ``growing`` (concatenated
            and returned), ``fresh`` (new rows, returned) or ``read-only``.
        write_form: how the model writes it, e.g. ``index_put``, ``slice_scatter``, ``scatter``, ``where``, ``cat``.
        source: Dynamo's name of the tensor (``L['past_key_values'].layers[0].keys``), or the name of its node.
        shape: logical shape, symbolic sizes as strings.
        dtype: logical dtype, e.g. ``bfloat16``.
        format: registry name of its format, and its tokens in full precision: ``int4_per_channel (1 to 64 recent)``.
        bytes_per_token_before: bytes per token and KV head of the logical dtype.
        bytes_per_token_after: bytes per token and KV head in the packed cache, metadata included.
        residual_bytes: further bytes per sequence and KV head, for recent and first tokens in full precision.
    """

    role: str
    kind: str
    write_form: str
    source: str
    shape: tuple[int | str, ...]
    dtype: str
    format: str
    bytes_per_token_before: int
    bytes_per_token_after: int
    residual_bytes: int = 0


@dataclass
class Site:
    """One attention call of a compiled graph.

    Attributes:
        module: qualified name of the module that calls attention (``model.layers.0.self_attn``), or "" at top level.
        layer: the layer index in that name, if it has one.
        attention: the recognised form of attention, e.g. ``sdpa, bool mask``.
        caches: its packed caches; empty when refused.
        reason: why plain Inductor compiles the site; None when it was rewritten.
        reason_code: a short stable name of that reason, e.g. ``escaping_view``.
    """

    module: str
    layer: int | None
    attention: str
    caches: tuple[CacheSummary, ...] = ()
    reason: str | None = None
    reason_code: str | None = None

    @property
    def rewritten(self) -> bool:
        return self.reason is None

    def refuse(self, refusal: Refusal) -> None:
        """Leave the site to plain Inductor, for the reason of ``refusal``."""
        self.reason, self.reason_code = str(refusal), refusal.reason.name

    @property
    def remedy(self) -> str | None:
        """The remedy of the reason; None without a reason, or if it is not a member of :class:`Reason`."""
        reason = Reason.__members__.get(self.reason_code or "")
        return reason.remedy if reason is not None else None


def num_layers(sites: Sequence[Site]) -> int:
    """The number of layers of a model with these sites."""
    return 1 + max((site.layer or 0 for site in sites), default=0)


def num_layers_in_graph(sites: Sequence[Site]) -> int | None:
    """The number of layers of the model, as far as one graph with these sites tells it.

    None for a single site. It may be one layer of a model whose layers are compiled one by one, or with graph breaks
    between them.
    """
    return num_layers(sites) if len(sites) > 1 else None
