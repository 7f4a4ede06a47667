"""Ask the policy for the formats of every proven cache, and check that they can hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.fx import Node

from kvcompile.kernels.formats import bases
from kvcompile.kernels.lang.gpus import why_unsupported
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.calling import PackedInput
from kvcompile.passes.prove.cache import Attention, Cache
from kvcompile.passes.prove.candidate import Candidate
from kvcompile.passes.prove.fuse_computed import fuse_computed_keys, layouts_of_operands, why_no_kernel
from kvcompile.passes.refusal import Reason, Refusal
from kvcompile.passes.site import FormatPair, num_layers_in_graph

ChooseFormats = Callable[[str, int | None, int | None], FormatPair | None]
"""(module, layer, number of layers) -> formats, or None to leave the layer unchanged; numbers may be unknown."""


def choose_formats(
    candidates: Sequence[Candidate], policy: ChooseFormats, packed_inputs: Mapping[Node, PackedInput]
) -> None:
    """Give the caches of every accepted candidate their layouts, or refuse its site.

    A cache with several readers has the layout that its first reader gets.

    Args:
        candidates: the candidates of one graph.
        policy: gives the formats of a layer.
        packed_inputs: the placeholders that arrive as packed caches, which keep their layout.
    """
    layers = num_layers_in_graph([candidate.site for candidate in candidates])
    first_layouts: dict[Node, PackedLayout] = {}
    for candidate in candidates:
        if not candidate.accepted:
            continue
        try:
            for cache in candidate.caches:
                _check_device(cache)
            formats = policy(candidate.site.module, candidate.site.layer, layers)
            candidate.layouts = {
                cache.role: first_layouts.setdefault(cache.root, _layout(cache, formats, packed_inputs.get(cache.base)))
                for cache in candidate.caches
            }
            for cache in candidate.caches:
                _check_basis(cache, candidate.layouts[cache.role])
                _check_shared(cache, candidate.layouts[cache.role])
                _check_moves(cache, candidate.layouts[cache.role])
            fuse_computed_keys(candidate)
            _check_kernels(candidate)
        except Refusal as refusal:
            candidate.site.refuse(refusal)


def _layout(cache: Cache, formats: FormatPair | None, packed: PackedInput | None) -> PackedLayout:
    """The layout that the policy gives to a cache. A cache that is packed already keeps its own."""
    if packed is not None:
        if not packed.is_cache:
            how = "as a slice or another part of a packed tensor"
            raise Refusal(Reason.packed_otherwise, role=cache.role, how=how)
        if packed.layout.role != cache.role:
            raise Refusal(Reason.packed_otherwise, role=cache.role, how=f"as a {packed.layout.role}")
        if packed.layout.head_dim != cache.head_dim:
            how = f"with heads of {packed.layout.head_dim} channels instead of {cache.head_dim}"
            raise Refusal(Reason.packed_otherwise, role=cache.role, how=how)
        if packed.axes != cache.input_axes:
            how = f"with its dimensions in the order {packed.axes} instead of {cache.input_axes}"
            raise Refusal(Reason.packed_otherwise, role=cache.role, how=how)
        if packed.growing and cache.kind == "static":
            raise Refusal(Reason.growing_written, role=cache.role)
        return packed.layout
    if formats is None:
        raise Refusal(Reason.policy_auto)
    if cache.serves_both and formats.key != formats.value:
        detail = f"the policy gives it two formats, {formats.key} and {formats.value}"
        raise Refusal(Reason.shared_key_value, detail=detail)
    layout = formats.layout(cache.role, cache.head_dim, cache.dtype)
    unsupported = layout.unsupported(cache.dtype)
    if unsupported is not None:
        raise Refusal(Reason.unsupported_format, format=layout.format_name, detail=unsupported)
    return layout


def _check_device(cache: Cache) -> None:
    """Raise Refusal if no kernel runs on the device of a cache."""
    detail = why_unsupported(cache.root.meta["val"].device)
    if detail is not None:
        raise Refusal(Reason.unsupported_device, detail=detail)


def _check_basis(cache: Cache, layout: PackedLayout) -> None:
    """Raise Refusal if a calibrated format was calibrated for other heads than the cache has, or not at all."""
    fmt = layout.format
    if not fmt.is_calibrated:
        return
    if not fmt.basis:
        detail = "it has no calibration; name a transforms file in the policy"
        raise Refusal(Reason.unsupported_format, format=layout.description, detail=detail)
    basis = bases.find(fmt.basis)
    if (basis.num_heads, basis.head_dim) != (cache.num_kv_heads, cache.head_dim):
        detail = (
            f"it was calibrated for {basis.num_heads} KV heads of {basis.head_dim} channels, but the {cache.role} "
            f"cache has {cache.num_kv_heads} of {cache.head_dim}"
        )
        raise Refusal(Reason.unsupported_format, format=layout.description, detail=detail)
    if any(read.regroups_heads for read in cache.reads):
        detail = f"it was calibrated for each head, and attention takes heads of the {cache.role} cache for sequences"
        raise Refusal(Reason.unsupported_format, format=layout.description, detail=detail)


def _check_kernels(candidate: Candidate) -> None:
    """Raise Refusal if no kernel computes the attention of a site on its formats on a GPU."""
    attention = candidate.attention
    if not isinstance(attention, Attention):
        return
    reason = why_no_kernel(attention, candidate.layouts)
    if reason is not None:
        layouts = layouts_of_operands(attention, candidate.layouts)
        format_names = " and ".join(dict.fromkeys(layout.description for layout in layouts))
        raise Refusal(Reason.unsupported_format, format=format_names, detail=reason)


def _check_shared(cache: Cache, layout: PackedLayout) -> None:
    """Raise Refusal if a layout does not suit a cache that serves as keys and values, or attention on a GPU."""
    on_gpu = cache.root.meta["val"].device.type == "cuda"
    holds_latents = cache.serves_both or cache.computing
    if on_gpu and not layout.format.has_levels and not (holds_latents and layout.residual is None):
        detail = "on a GPU it is for latents that serve as keys and values, without tokens in full precision"
        raise Refusal(Reason.unsupported_format, format=layout.description, detail=detail)
    if cache.serves_both and cache.is_pool:
        raise Refusal(Reason.shared_key_value, detail="sequences share it as a pool of slots")
    if cache.serves_both and layout.format.granularity == "channel":
        raise Refusal(Reason.shared_key_value, detail=f"the scales of {layout.format_name} belong to channels of keys")


def _cannot_move(cache: Cache, layout: PackedLayout) -> bool:
    """Whether the graph moves tokens of a cache, and these share scales or exact blocks with other tokens."""
    return layout.residual is not None and any(change.moves for change in cache.changes)


def packed_but_moved(candidates: Sequence[Candidate], packed_inputs: Mapping[Node, PackedInput]) -> set[Node]:
    """The packed inputs of fixed size of the sites whose tokens the graph moves, although a format cannot move them.

    Values may have a format that can move tokens, but a site is refused as a whole.
    """
    refused = (
        candidate
        for candidate in candidates
        if candidate.layouts and any(_cannot_move(cache, candidate.layouts[cache.role]) for cache in candidate.caches)
    )
    caches = (cache for candidate in refused for cache in candidate.caches)
    return {cache.base for cache in caches if cache.kind == "static" and cache.base in packed_inputs}


def _check_moves(cache: Cache, layout: PackedLayout) -> None:
    """Raise Refusal if moved tokens, or tokens of a pool, share scales or exact blocks with other tokens."""
    if _cannot_move(cache, layout):
        detail = (
            "the model moves tokens within its window, and in this format neighbouring tokens share scales, or blocks "
            "in full precision; use a format whose scales are per token, without residual_length and sink_tokens"
        )
        raise Refusal(Reason.unsupported_format, format=layout.description, detail=detail)
    if layout.residual is not None and cache.is_pool:
        detail = (
            "sequences share a pool of slots, and in this format neighbouring slots share scales, or blocks in full "
            "precision; use a format whose scales are per token, without residual_length and sink_tokens"
        )
        raise Refusal(Reason.unsupported_format, format=layout.description, detail=detail)
