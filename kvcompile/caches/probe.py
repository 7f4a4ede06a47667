"""What a model of Transformers writes to a static cache: it runs on one token, mostly without memory or computing."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvcompile.caches.layer_kinds import full_layer_classes
from kvcompile.compat.modules import has_compiled_parts, original_module, running_eagerly, uncompiled_call
from kvcompile.compat.tracing import FakeTensorMode, fake_errors_unlogged
from kvcompile.compat.transformers import promises_static_caches, with_cache
from kvcompile.errors import KVCompileError

if TYPE_CHECKING:
    from transformers import Cache, StaticCache

MOST_DIFFERENT = 0.1
"""The largest relative difference of logits, L2, between a static and a dynamic cache.

Ten small models in bfloat16 reach 0.007."""

WHY_NOT_TRAINING = "its dropout is active, as in training; call model.eval()"
"""Why the requests of a model with active dropout get no packed cache."""


@dataclass
class Findings:
    """What :func:`kvcompile.caches.static.packed_cache` learns about a model.

    Attributes:
        left_plain: maps the index of each layer that its format cannot hold to the reason.
        states: the attributes of modules that became other tensors while the model ran on one token, such as
            ``model.layers.0.temporal_block.conv1d_state``. A recurrent model keeps its states there.
    """

    left_plain: dict[int, str] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)


def filled_by(model: nn.Module, config: Any, batch_size: int, max_len: int, found: Findings) -> StaticCache:
    """A static cache that the model has filled with one token.

    Its tensors have shapes, dtypes and devices, but no memory. A model whose code needs values, such as the routing of
    some mixtures of experts, computes one real token instead, in a cache with room for this token.
    """
    from transformers import StaticCache

    ids = torch.zeros((batch_size, 1), dtype=torch.int64, device=next(model.parameters()).device)
    try:
        cache = _checking_updates(StaticCache(config=config, max_cache_len=max_len), model)
        with _keeping_states(model, found), fake_errors_unlogged(), FakeTensorMode(allow_non_fake_inputs=True):
            _run_eagerly(model, cache, input_ids=ids)
        needs_values = False
    except KVCompileError:
        raise
    except Exception as error:
        try:
            cache, needs_values = _checking_updates(StaticCache(config=config, max_cache_len=1), model), True
            with _keeping_states(model, found):
                _run_eagerly(model, cache, input_ids=ids)
        except (KVCompileError, torch.OutOfMemoryError):
            raise
        except Exception:
            raise _does_not_run(model, error) from error
    if needs_values or not promises_static_caches(model):
        _check_outputs(model, config, max_len)
    return cache


def _checking_updates(cache: StaticCache, model: nn.Module) -> StaticCache:
    """``cache``, whose layers raise KVCompileError before a model writes anything to them that they cannot hold."""
    layer: Any
    for layer in cache.layers:
        if isinstance(layer, full_layer_classes()):
            layer.update = _CheckedUpdate(layer, type(model).__name__)
    return cache


class _CheckedUpdate:
    """The ``update`` of a static layer while a model runs on one token.

    The layer may have room for this token only. On a GPU a write past its end would end all work of the process. And a
    static layer has one dtype for keys and values, which operators on tensors without memory do not check.
    """

    def __init__(self, layer: Any, model: str) -> None:
        self._layer, self._model, self._num_tokens = layer, model, 0

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._num_tokens += keys.shape[2]
        if self._num_tokens > 1:
            raise KVCompileError(
                f"static_cache: {self._model} writes {self._num_tokens} tokens for one token of input, and a static "
                "cache has room for the tokens of the input; use a dynamic cache"
            )
        if keys.dtype != values.dtype:
            raise KVCompileError(
                f"static_cache: {self._model} computes keys in {keys.dtype} and values in {values.dtype}, and a static "
                "layer has one dtype for both; call the model outside of torch.autocast, for example after "
                "model.to(torch.bfloat16)"
            )
        return type(self._layer).update(self._layer, keys, values, *args, **kwargs)


@contextlib.contextmanager
def _keeping_states(model: nn.Module, found: Findings | None = None) -> Iterator[None]:
    """New tensors in the attributes of modules are replaced by what was there before, and noted in ``found``.

    A recurrent model may keep its states there, outside of its cache.
    """
    before = [(name, vars(module), dict(vars(module))) for name, module in model.named_modules()]
    states = []
    try:
        yield
    finally:
        for module, attributes, earlier in before:
            for name in [name for name, value in dict(attributes).items() if isinstance(value, torch.Tensor)]:
                if name not in earlier or earlier[name] is not attributes[name]:
                    states.append(f"{module}.{name}".lstrip("."))
                if name in earlier:
                    attributes[name] = earlier[name]
                else:
                    del attributes[name]
        if found is not None:
            found.states = states


def _does_not_run(model: nn.Module, error: Exception) -> KVCompileError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return KVCompileError(
        f"static_cache: {type(model).__name__} does not run on one token with a static cache ({reason}); pass "
        "its caches packed with kvcompile.PackedTensor.zeros instead"
    )


def _check_outputs(model: nn.Module, config: Any, max_len: int) -> None:
    """Compare the logits after four tokens with a static cache of up to 1024 tokens and with a dynamic cache.

    Raises:
        KVCompileError: they differ, for example because the model attends to all tokens that its cache has room for; or
            the model does not run with a static cache; or active dropout makes its logits random.
    """
    from transformers import DynamicCache, StaticCache

    if has_active_dropout(model):
        raise KVCompileError(
            f"static_cache: logits of {type(model).__name__} are compared with a static and a dynamic cache, and "
            f"{WHY_NOT_TRAINING} before you make the cache"
        )
    room = max(min(max_len, 1024), 4)
    caches = StaticCache(config=config, max_cache_len=room), DynamicCache(config=config)
    try:
        static, dynamic = (_logits(model, cache) for cache in caches)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _does_not_run(model, error) from error
    if not (static - dynamic).norm() <= MOST_DIFFERENT * dynamic.norm():
        raise KVCompileError(
            f"static_cache: {type(model).__name__} computes other logits with a static cache than with a dynamic one; "
            "use a dynamic cache, which compiled steps pack"
        )


def _logits(model: nn.Module, cache: Cache) -> torch.Tensor:
    """The logits after three tokens and after a fourth, of two sequences. The first one begins with padding."""
    device = next(model.parameters()).device
    mask = torch.ones((2, 4), dtype=torch.int64, device=device)
    mask[0, 0] = 0
    inputs = {"input_ids": torch.tensor([0, 1, 2, 0], device=device).expand(2, 4)}
    if "position_ids" in inspect.signature(original_module(model).forward).parameters:
        # Without them some models give the fourth token the positions of all tokens in the mask (Qwen3-VL-MoE).
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    logits = []
    with _keeping_states(model):
        for begin, end in ((0, 3), (3, 4)):
            tokens = {name: x[:, begin:end] for name, x in inputs.items()}
            logits.append(_run_eagerly(model, cache, attention_mask=mask[:, :end], **tokens)[0][:, -1:])
    return torch.cat(logits).float()


def _run_eagerly(model: nn.Module, cache: Cache, **inputs: torch.Tensor) -> Any:
    # Compiled code would compile for this call, or run kernels on tensors without memory.
    model = original_module(model)
    eagerly = running_eagerly() if has_compiled_parts(model) else contextlib.nullcontext()  # it affects all threads
    with torch.no_grad(), eagerly, _without_cached_casts():
        return uncompiled_call(model)(**inputs, use_cache=True, **with_cache(model, cache))


@contextlib.contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Autocast casts weights anew, and keeps none: weights without memory would stay in its cache."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def has_active_dropout(model: nn.Module) -> bool:
    """Whether a module drops random elements: its name or the name of its probability contains ``dropout``."""
    return any(
        isinstance(value, float) and value > 0 and "dropout" in f"{type(module).__name__}.{name}".lower()
        for module in model.modules()
        if module.training
        for name, value in vars(module).items()
    )
