"""Packed caches for the requests of one model. Each cache is reused by the next request."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo
from torch import nn

from kvcompile.caches import room
from kvcompile.caches.blockwise_window import is_blockwise
from kvcompile.caches.layer import clear
from kvcompile.caches.layer_kinds import full_layer_classes, growing_layer_class, is_full, is_window
from kvcompile.caches.probe import Findings
from kvcompile.caches.static import attention_modules, autocast_dtype, is_packed, packed_cache, packed_layers
from kvcompile.compat.transformers import prepare_inputs
from kvcompile.errors import KVCompileError
from kvcompile.packed.tensor import PACKED_DIM
from kvcompile.policy.policy import OnUnsupported, Policy

if TYPE_CHECKING:
    from transformers import Cache, StaticCache


class RequestCaches:
    """Packed static caches for the requests of one model.

    The cache of a finished request is kept for the next request that has the same batch size and needs no more room.
    Requests in several threads have separate caches. Only the cache that was given back last is kept.
    """

    def __init__(self, model: nn.Module, policy: Policy, on_unsupported: OnUnsupported) -> None:
        self._model = model
        self._policy = policy
        self._on_unsupported = on_unsupported
        self._lock = threading.Lock()
        self._kept: StaticCache | None = None

    def take(self, batch_size: int, num_tokens: int) -> Any:
        """An empty cache of ``batch_size`` sequences with room for at least ``num_tokens`` tokens each.

        The cache can be cropped, and its beams can be reordered in place. A layer that its format cannot hold is plain,
        unless ``on_unsupported`` is ``error``. The attribute ``findings`` of the cache names these layers.

        Raises:
            PolicyError, KVCompileError: see :func:`kvcompile.static_cache`; or the model does not prepare its inputs
                for such a cache.
        """
        num_tokens = room.room_for(num_tokens)
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and self._serves(kept, batch_size, num_tokens) and _can_change(kept):
            clear_all(kept)
            layers: list[Any] = kept.layers
            for layer in filter(is_blockwise, layers):
                layer.serve(num_tokens)
            return kept
        kept, findings = None, Findings()  # free the old cache before the new cache is allocated
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            cache: Any = packed_cache(
                self._model, batch_size, num_tokens, self._policy,
                blockwise=True, on_unsupported=self._on_unsupported, findings=findings,
            )  # fmt: skip
        _check_preparation(self._model, cache, batch_size)
        cache.__class__ = _request_cache_class()
        cache.made_for, cache.findings = self._made_for(batch_size, num_tokens), findings
        return cache

    def has_packed_layers(self, cache: StaticCache) -> bool:
        """Whether a layer is packed, or has a window that the first compiled step packs."""
        return bool(packed_layers(cache)) or any(map(is_window, self._plain_layers(cache)))

    def why_not_packed(self, cache: StaticCache) -> str | None:
        """Why no layer with keys and values is packed from the start; None if the policy has no format for any."""
        kinds = dict.fromkeys(type(layer).__name__ for layer in self._plain_layers(cache))
        if not kinds:
            return None
        return (
            f"layers of the kind {' and '.join(kinds)} are not packed before a step is compiled; pass a "
            "transformers.StaticCache as its cache, which compiled steps pack"
        )

    def _plain_layers(self, cache: StaticCache) -> list[Any]:
        """The layers with keys and values that are not packed, although the policy has a format that can hold them."""
        modules = attention_modules(self._model)
        return [
            layer
            for index, layer in enumerate(cache.layers)
            if isinstance(layer, full_layer_classes())
            and not is_packed(layer)
            and index not in findings_of(cache).left_plain
            and self._policy.formats_for(modules.get(index, ""), index, len(cache.layers)) is not None
        ]

    def give_back(self, cache: StaticCache) -> None:
        """Keep the cache of a finished request."""
        with self._lock:
            self._kept = cache

    def state(self) -> ModelState:
        """The present state of the model, as far as its caches depend on it."""
        parameter = next(self._model.parameters())
        return ModelState(parameter.device, parameter.dtype, autocast_dtype(parameter.device))

    def _made_for(self, batch_size: int, num_tokens: int) -> MadeFor:
        return MadeFor(batch_size, self.state(), num_tokens)

    def _serves(self, cache: Any, batch_size: int, num_tokens: int) -> bool:
        made, wanted = cache.made_for, self._made_for(batch_size, num_tokens)
        return bool(made[:-1] == wanted[:-1] and made.num_tokens >= wanted.num_tokens)


class ModelState(NamedTuple):
    """What the dtypes and the device of a model's caches depend on. ``autocast`` is None if it is off."""

    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None


class MadeFor(NamedTuple):
    """The requests that a cache serves: of this batch size, in this state, with up to ``num_tokens`` tokens."""

    batch_size: int
    state: ModelState
    num_tokens: int


def _check_preparation(model: Any, cache: Any, batch_size: int) -> None:
    """Raise KVCompileError if ``generate()`` cannot prepare inputs for ``cache``, but can for a dynamic cache."""
    from transformers import DynamicCache

    error = _error_of_preparation(model, cache, batch_size)
    if error is None or _error_of_preparation(model, DynamicCache(config=model.config), batch_size) is not None:
        return
    raise KVCompileError(
        f"Transformers does not prepare the inputs of {type(model).__name__} for a static cache ({error}); update "
        "Transformers, or pass a transformers.DynamicCache as its cache, which compiled steps pack"
    )


def _error_of_preparation(model: Any, cache: Any, batch_size: int) -> str | None:
    """The first line of the error with which a model fails to prepare the inputs of a step; None if it does not."""
    ids = torch.zeros((batch_size, 1), dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            prepare_inputs(model, ids, cache, attention_mask=torch.ones_like(ids), use_cache=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def findings_of(cache: Any) -> Findings:
    """What was learned about the model for which a cache of :class:`RequestCaches` was made."""
    return getattr(cache, "findings", None) or Findings()


def why_plain(cache: Any) -> str | None:
    """Which layers of a cache of :class:`RequestCaches` their formats cannot hold, and why; None if there are none."""
    layers: dict[str, list[str]] = {}
    for index, reason in findings_of(cache).left_plain.items():
        layers.setdefault(reason, []).append(str(index))
    texts = [
        f"{'layer' if len(each) == 1 else 'layers'} {', '.join(each)}: {reason}" for reason, each in layers.items()
    ]
    return "; ".join(texts) or None


def hand_out(cache: Any) -> None:
    """Change a cache of :class:`RequestCaches` to a public class, so that users can save, copy and pass it on."""
    from transformers import StaticCache

    cache.__class__ = StaticCache
    del cache.made_for, cache.findings


def can_crop(cache: Cache) -> bool:
    """Whether a static cache can drop its last tokens. Sliding windows and states cannot restore earlier tokens."""
    return not _kinds_without_crop(cache)


def can_forget(cache: Cache) -> bool:
    """Whether a cache that drops its last token is as it was before, for any later attention.

    Tokens in full precision are not: the last token has taken the place of another one. Nor are scales per channel,
    which come with such tokens.
    """
    layers: Any = cache.layers
    return can_crop(cache) and all(is_packed(each) and _is_packed_alone(each) for each in layers)


def crop(cache: Cache, tokens_to_remove: int) -> None:
    """Drop the last ``-tokens_to_remove`` tokens of a static cache, which stay masked until they are overwritten."""
    layers: Any = cache.layers
    for layer in layers:
        if is_full(layer):
            layer.cumulative_length.add_(tokens_to_remove)
        else:
            layer.crop(tokens_to_remove)


def why_no_crop(cache: Cache) -> str:
    """Why a static cache cannot drop its last tokens, with the remedy."""
    kinds = " and ".join(_kinds_without_crop(cache))
    return (
        f"assisted decoding drops wrong guesses, and layers of the kind {kinds} cannot drop tokens; without "
        "assistant_model and prompt_lookup_num_tokens its cache is packed"
    )


def _kinds_without_crop(cache: Cache) -> list[str]:
    """The kinds of layers that cannot drop tokens."""
    layers: Any = cache.layers
    return list(dict.fromkeys(type(layer).__name__ for layer in layers if not _can_crop(layer)))


def _can_crop(layer: Any) -> bool:
    return type(layer) is full_layer_classes()[0] or (is_blockwise(layer) and layer.is_croppable)


def _can_change(cache: StaticCache) -> bool:
    """Whether tensors of a cache can be changed here. Those that its request made in inference mode cannot outside."""
    if torch.is_inference_mode_enabled():
        return True
    values = [value for layer in cache.layers for value in vars(layer).values()]
    values += [state for value in values if isinstance(value, dict) for state in value.values()]
    return not any(isinstance(value, torch.Tensor) and value.is_inference() for value in values)


def clear_all(cache: StaticCache) -> None:
    """Reset a cache to its initial state, in place."""
    layer: Any
    for index, layer in enumerate(cache.layers):
        if type(layer) is growing_layer_class():
            cache.layers[index] = growing_layer_class()()  # Transformers 5.17 keeps its tensors and appends to them
        elif not is_packed(layer) or is_blockwise(layer):
            layer.reset()
        else:
            clear(layer)
            if _has_states(layer):
                _states_class().reset(layer)


def _has_states(layer: Any) -> bool:
    """Whether a packed layer also has states of linear attention."""
    return is_full(layer) and type(layer) is not full_layer_classes()[0]


def _states_class() -> Any:
    from transformers.cache_utils import LinearAttentionLayer

    return LinearAttentionLayer


def _is_packed_alone(layer: Any) -> bool:
    """Whether a packed layer has no tokens in full precision."""
    return all(tensor.packed_layout.residual is None for tensor in (layer.keys, layer.values))


@functools.cache
def _request_cache_class() -> type:
    from transformers import StaticCache

    class RequestCache(StaticCache):
        """A packed static cache that can drop its last tokens and reorder its sequences in place."""

        def crop(self, tokens_to_remove: int) -> None:
            if tokens_to_remove > 0:
                raise ValueError(f"crop: tokens_to_remove is {tokens_to_remove}; pass a negative number of tokens")
            crop(self, tokens_to_remove)

        def reorder_cache(self, beam_idx: torch.Tensor) -> None:
            """Copy sequence ``beam_idx[i]`` to each sequence ``i``. Addresses stay fixed for compiled code."""
            layer: Any
            for layer in self.layers:
                if not is_packed(layer):
                    layer.reorder_cache(beam_idx)
                    continue
                for tensor in (layer.keys, layer.values):
                    reordered = tensor.packed.index_select(PACKED_DIM["b"], beam_idx.to(tensor.device))
                    tensor.packed.copy_(reordered)
                if _has_states(layer):
                    _states_class().reorder_cache(layer, beam_idx)

    return RequestCache
