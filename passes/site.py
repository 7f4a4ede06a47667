"""What the passes know about one attention site: where it is, what was decided, or why it was left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.kernels.formats import get_format
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual, Role, num_blocks
from kvcompile.passes.refusal import Reason, Refusal


@dataclass(frozen=True)
class FormatPair:
    """How one layer's cache is stored.

    Attributes:
        key: format of keys, by registry name.
        value: format of values.
        residual_length: recent tokens that are kept in the dtype of the cache, in whole blocks; at least one block of
            keys whose scales are per channel.
        sink_tokens: first tokens that are kept so, in whole blocks.
    """

    key: str
    value: str
    residual_length: int = 0
    sink_tokens: int = 0

    def format_name(self, role: Role) -> str:
        return self.key if role == "key" else self.value

    def residual(self, role: Role, dtype: torch.dtype) -> Residual | None:
        """What keys or values of a cache of ``dtype`` keep as they are."""
        recent_blocks, sink_blocks = num_blocks(self.residual_length), num_blocks(self.sink_tokens)
        if get_format(self.format_name(role)).granularity == "channel":
            recent_blocks = max(recent_blocks, 1)
        return Residual(sink_blocks, recent_blocks, dtype) if recent_blocks + sink_blocks else None

    def layout(self, role: Role, head_dim: int, dtype: torch.dtype) -> PackedLayout:
        """The layout of keys or values of a cache of ``dtype``."""
        return PackedLayout(self.format_name(role), role, head_dim, self.residual(role, dtype))


@dataclass(frozen=True)
class CacheSummary:
    """One cache tensor of a rewritten site.

    Attributes:
        role: ``key`` or ``value``.
        kind: ``static`` (a buffer that arrives and is mutated), ``allocated`` (a buffer made inside the graph) or
            ``growing`` (concatenated and returned).
        write_form: how the model writes it, e.g. ``index_put``, ``slice_scatter``, ``scatter``, ``where``, ``cat``.
        source: where the tensor comes from, in Dynamo's words (``L['past_key_values'].layers[0].keys``), or its node.
        shape: logical shape, symbolic sizes as strings.
        dtype: logical dtype, e.g. ``bfloat16``.
        format: registry name of its format, and what it keeps as it is: ``int4_per_channel (64 recent)``.
        bytes_per_token_before: bytes per token and KV head of the logical dtype.
        bytes_per_token_after: bytes per token and KV head in the packed cache, metadata included.
        residual_bytes: bytes per sequence and KV head of recent and first tokens that it keeps as they are besides.
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
        attention: what was recognised, e.g. ``sdpa causal, gqa 4``.
        caches: what became of its caches; empty when refused.
        reason: why the site was left to plain Inductor; None when it was rewritten.
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
        """Leave the site to plain Inductor, for the reason that ``refusal`` carries."""
        self.reason, self.reason_code = str(refusal), refusal.reason.name

    @property
    def remedy(self) -> str | None:
        """What the user can do about the reason; None if there is none, or it is not of our list."""
        reason = Reason.__members__.get(self.reason_code or "")
        return reason.remedy if reason is not None else None


def num_layers(sites: Sequence[Site]) -> int:
    """How many layers the sites of one graph come from."""
    return 1 + max((site.layer or 0 for site in sites), default=0)
