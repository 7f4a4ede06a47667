"""``generate()`` of a compiled Transformers model: its cache is packed from the start, and decode steps are compiled.

``generate()`` of Transformers makes a cache, fills it with the prompt, and then decodes token by token. Transformers
compiles decode steps only on GPUs. It compiles neither beam search nor steps on its default cache, which grows. It
compiles assisted decoding only since release 5.24. A :class:`Generation` replaces five methods of a model, and its
calls:

- ``generate`` begins and ends a request;
- ``_prepare_cache_for_generation`` takes a packed cache for the request; the next request reuses its memory;
- ``_valid_auto_compile_criteria`` is false if kvcompile compiles the decode steps, so Transformers does not compile
  them;
- ``_get_stopping_criteria`` shows whether the request may end before its greatest length; on GPUs most requests learn
  that they have ended one step late (:mod:`kvcompile.compat.stop_checks`), so the GPU does not wait for the host;
- ``init_continuous_batching`` makes a manager whose pages are packed (:mod:`kvcompile.generation.generate_batch`);
- a call of the model in a request runs compiled if it is a decode step with the cache of the request, and otherwise
  eagerly.

Some requests run without packed caches: requests without a cache, requests with a cache that Transformers offloads or
quantizes, requests of an assistant model, and requests to a model whose state is not a KV cache. The report says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from kvcompile.backend import ConfiguredBackend
from kvcompile.caches.blockwise_window import prepared_for_step
from kvcompile.caches.pages import has_packed_pages
from kvcompile.caches.probe import WHY_NOT_TRAINING, has_active_dropout
from kvcompile.caches.prompt import (
    expect_first_prompt,
    expect_other_tokens,
    expects_first_prompt,
    is_made_for_layers,
    updating_layers,
)
from kvcompile.caches.prompt_kernels import precompile_prompt
from kvcompile.caches.requests import (
    ModelState,
    RequestCaches,
    can_crop,
    can_forget,
    clear_all,
    crop,
    findings_of,
    hand_out,
    why_no_crop,
    why_plain,
)
from kvcompile.caches.room import make_room, move_by_blocks
from kvcompile.caches.static import WHY_NOT_FLEX, attention_modules, packed_layers
from kvcompile.call.key_outliers import examine
from kvcompile.compat.modules import COMPILED_CALL, uncompiled_call
from kvcompile.compat.stop_checks import STOPPING_CRITERIA, may_end_early, stopping_late
from kvcompile.compat.tracing import is_traced_here
from kvcompile.compat.transformers import (
    COMPILES_FOR_ITSELF,
    PREPARE_CACHE,
    arguments_of_generate,
    attends_by_flex,
    cache_argument_of_generate,
    gives_attention_maps,
    makes_dynamic_caches,
    renamed_cache,
)
from kvcompile.errors import KVCompileError, OptionsError, PolicyError, one_line
from kvcompile.generation.decode_steps import DecodeSteps
from kvcompile.generation.generate_batch import drop_kept_manager, packed_manager
from kvcompile.generation.past import reads_past_again, repeats_the_past
from kvcompile.report import report
from kvcompile.report.launch_hint import no_launch_hint

_ATTRIBUTE = "_kvcompile_generation"
"""The attribute of a model that holds its Generation."""

_METHODS = {
    "generate": "generate",
    PREPARE_CACHE: "prepare_cache",
    COMPILES_FOR_ITSELF: "compiles_for_itself",
    STOPPING_CRITERIA: "stopping_criteria",
    "init_continuous_batching": "init_batching",
}
"""Maps each method of a model that a Generation replaces to the method of the Generation."""

_FORWARDS = "_kvcompile_forwards"
"""An attribute of the methods that call a Generation. A deep copy of a model still has them, bound to the copy."""

_COMPILED_CODE = threading.RLock()
"""Held while compiled code runs, because PyTorch refuses to run it while another thread traces a graph."""

_ASSISTED = "assisted_generation"
_SERVED_MODES = ("greedy_search", "sample", "beam_search", "beam_sample", _ASSISTED)
_SERVED_CACHES = (None, "dynamic", "static")

_CODE_OF_THE_CALLER = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""Arguments of ``generate()`` that it calls for each token."""

_CACHE_OF_THE_MODEL = (
    "Transformers lets the model make its cache itself; call kvcompile.uncompile(model), and then "
    "model.compile(backend=kvcompile.kvquant(policy=...)), which packs the keys and values in this cache if it has any"
)
_BY_THE_CALLER = "custom_generate runs the caller's code, which may keep the cache"
_PACKS_NOTHING = "it has no layer of keys and values for which the policy has a format"
_NO_COMPILED_STEP = "only compiled steps pack its cache, and this request compiled none"
"""Some reasons why a request runs without a packed cache."""


@dataclass
class Request:
    """A running call of ``generate()``.

    Attributes:
        is_custom: whether the caller's own decoding function runs, which may keep the cache.
        calls_back: whether code of the caller is called for each token. It might count its calls.
        served: the packed cache that the request got; None if it got none.
        cache: the cache of the request, if the model did not leave it to Transformers: ``served``, or the caller's
            cache.
        decodes_with: the cache whose decode steps are compiled: ``cache``, or None.
        keeps_outputs: whether outputs of all steps, such as hidden states, are returned. CUDA graphs would overwrite
            them.
        records: whether decode steps may be CUDA graphs. Only one request at a time may record, because a step of
            another thread would overwrite its outputs.
        may_end_early: whether the request may end before its greatest length.
        has_prepared: whether the model has prepared a cache. If it has, it decodes itself, rather than a model that it
            contains.
        has_called: whether a call of the model has returned.
        has_compiled_step: whether a decode step has run compiled.
        failed: why the same request failed before its first call returned; None if this is the first attempt.
        plain_because: why the request gets no packed cache; None if it gets one, or if the caller passes a cache.
    """

    is_custom: bool = False
    calls_back: bool = False
    failed: str | None = None
    served: Any = None
    cache: Any = None
    decodes_with: Any = None
    keeps_outputs: bool = False
    records: bool = False
    may_end_early: bool = True
    has_prepared: bool = False
    has_called: bool = False
    has_compiled_step: bool = False
    plain_because: str | None = None

    def is_decode_step(self, ids: Any, cache: Any) -> bool:
        """Whether a call with token ids ``ids`` adds one token to each sequence in the cache of this request."""
        return cache is not None and cache is self.decodes_with and ids is not None and ids.shape[1:] == (1,)

    def stops_late(self, cache: Any, is_returned: bool) -> bool:
        """Whether one step too many leaves no trace. See :class:`kvcompile.compat.stop_checks.StopsLate`."""
        if self.is_custom or cache is None or cache is not self.decodes_with:
            return False
        if not self.may_end_early:
            return True  # the host knows the last step
        return not self.calls_back and (not is_returned or can_forget(cache))

    def drop_last_token(self) -> None:
        crop(self.decodes_with, -1)


class Generation:
    """Serves ``generate()`` of one model until :meth:`remove`.

    Several threads may generate with the model at the same time. Copies of the model, by pickle or otherwise, use the
    methods of their class.
    """

    def __init__(self, model: Any, backend: ConfiguredBackend, outer: Generation | None = None, **how: Any) -> None:
        """
        Args:
            model: a model for which :func:`is_generative` holds.
            backend: compiles the model. On GPUs, decode steps become CUDA graphs unless the backend has a mode.
            outer: the Generation of a model that contains this one. During requests of the outer model, this model runs
                compiled only if the outer model decodes with the ``generate()`` of this model.
            how: further keywords of ``torch.compile``.
        """
        self._model = model
        self._outer = outer
        self._cache_argument = cache_argument_of_generate(model)
        self._caches = RequestCaches(model, backend.options.policy, backend.options.on_unsupported)
        self._refused: dict[ModelState, str] = {}
        self._options = backend.options
        self._of_thread = threading.local()
        self._looks = backend.options.policy.key_outliers != "ignore"
        self._is_exact = backend.options.policy.prefill == "exact"
        self._has_served = False
        self._explained: set[str] = set()
        self._steps = DecodeSteps(model, backend, **how)
        replaced: dict[str, Any] = {name: _forwarding(name, model) for name in _METHODS}
        replaced |= {COMPILED_CALL: self._call_model, _ATTRIBUTE: self}
        own = {name: vars(model).get(name) for name in replaced}
        self._before = {name: None if hasattr(method, _FORWARDS) else method for name, method in own.items()}
        vars(model).update(replaced)

    @staticmethod
    def of(model: nn.Module) -> Generation | None:
        """The Generation of ``model``, or None. A shallow copy has the attribute of its original, but no Generation."""
        generation: Generation | None = vars(model).get(_ATTRIBUTE)
        return generation if generation is not None and generation._model is model else None

    def remove(self) -> None:
        """Restore the methods and calls of the model."""
        drop_kept_manager(self._model)
        for name, value in self._before.items():
            del vars(self._model)[name]
            if value is not None:
                vars(self._model)[name] = value

    # Called in place of the model's own methods; see their docstrings in Transformers

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        around = None if self._outer is None else self._outer._request
        if around is not None and around.has_prepared:
            return self._original("generate")(*args, **kwargs)
        given = arguments_of_generate(self._model, args, kwargs)
        calls_back = any(given.get(name) for name in _CODE_OF_THE_CALLER)
        request = Request(is_custom=given.get("custom_generate") is not None, calls_back=calls_back)
        try:
            return self._result_of(request, args, kwargs)
        except Exception as error:
            if not self._may_repeat(request, error) or given.get("streamer") is not None:
                raise
            failed = f"{type(error).__name__}: {one_line(error)}"
        return self._result_of(Request(calls_back=calls_back, failed=failed), args, kwargs)

    def _result_of(self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._requested(request), stopping_late(request):
            request.plain_because = _BY_THE_CALLER if request.is_custom else None
            result = self._original("generate")(*args, **renamed_cache(kwargs, self._cache_argument))
            self._count(request)
            returned: Any = getattr(result, self._cache_argument, None)
            if returned is not None and returned is request.served:
                hand_out(returned)
                request.served = None  # the caller owns it from now on
        return result

    def _may_repeat(self, request: Request, error: Exception) -> bool:
        """Whether a request that failed may run again without a packed cache. Nothing was generated yet.

        An input that only some requests have, such as an image, may make a model fail with any static cache (GIT).
        """
        is_ours = isinstance(error, (KVCompileError, torch.OutOfMemoryError))
        return (
            request.served is not None
            and not (request.has_called or request.has_compiled_step or is_ours)
            and self._options.on_unsupported != "error"
        )

    def prepare_cache(
        self, config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        request, cache = self._request, model_kwargs.get(self._cache_argument)
        if request is not None:
            request.has_prepared = True
        if request is not None and config.compile_config is not None:
            raise OptionsError(
                "generate: compile_config is given, and kvcompile.compile has compiled this model already; drop "
                "compile_config, or call kvcompile.uncompile(model) first"
            )
        if request is not None and cache is None:
            request.plain_because = self._why_unchanged(request, config, mode.value)
        if request is not None and cache is None and request.plain_because is None:
            num_sequences = batch_size * max(config.num_beams, config.num_return_sequences)
            num_tokens = max(max_cache_length, config.max_cache_len or 0)
            cache = self._taken(request, num_sequences, num_tokens, mode.value)
            if cache is not None:
                model_kwargs[self._cache_argument] = request.served = cache
        if request is None or request.served is None:
            self._original(PREPARE_CACHE)(config, model_kwargs, mode, batch_size, max_cache_length)
            if cache is not None:
                if mode.value == _ASSISTED and reads_past_again(cache, config, model_kwargs):
                    clear_all(cache)
                is_on_top = not repeats_the_past(config, model_kwargs)
                make_room(cache, self._model, self._options.policy, max_cache_length, is_on_top=is_on_top)
        if request is not None:
            warns = config.output_attentions and not gives_attention_maps(self._model.config)  # a graph break
            request.cache, request.decodes_with = cache, None if config.disable_compile or warns else cache
            request.keeps_outputs = bool(config.output_hidden_states or config.output_attentions)
            if request.served is not None and self._is_exact and not request.keeps_outputs:
                expect_first_prompt(request.served)

    def compiles_for_itself(self, *args: Any, **kwargs: Any) -> bool:
        compiles = self._request is not None and self._request.decodes_with is not None
        return not compiles and self._original(COMPILES_FOR_ITSELF)(*args, **kwargs)

    def stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        criteria = self._original(STOPPING_CRITERIA)(*args, **kwargs)
        if self._request is not None:
            self._request.may_end_early = may_end_early(criteria)
        return criteria

    def init_batching(self, *args: Any, **kwargs: Any) -> Any:
        return packed_manager(self._model, self._options, self._original("init_continuous_batching"), *args, **kwargs)

    def _call_model(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced_here() or has_packed_pages(kwargs.get("cache")):
            return uncompiled_call(self._model)(*args, **kwargs)
        request, records = self._request, False
        if request is None and self._outer is not None and self._outer._request is not None:
            return uncompiled_call(self._model)(*args, **kwargs)
        cache_of_call: Any = renamed_cache(kwargs, self._cache_argument).get(self._cache_argument)
        if request is not None and not request.is_decode_step(kwargs.get("input_ids"), cache_of_call):
            look = None
            if self._looks and request.served is not None:
                self._looks, look = False, _look_at_keys(self._model, request.served)
            if not is_made_for_layers(kwargs.get("attention_mask")):
                expect_other_tokens(packed_layers(request.served))
            self._before_first_prompt(request.served, kwargs.get("input_ids"))
            with updating_layers(packed_layers(cache_of_call), exact=self._is_exact, look=look):
                result = uncompiled_call(self._model)(*args, **kwargs)
            if request is not None:
                request.has_called = True
            return result
        if request is None:
            move_by_blocks(cache_of_call, self._model, self._options.policy)
        else:
            if request.served is not None and not request.has_compiled_step:
                expect_other_tokens(packed_layers(request.served))
            request.has_compiled_step = True
        if request is not None and request.records and not request.keeps_outputs:
            records = cache_of_call.is_compileable
        hint = nullcontext() if request is None else no_launch_hint()
        with _COMPILED_CODE, hint, _counted(cache_of_call, args, kwargs):
            return self._steps(*args, records=records, **kwargs)

    # Their implementation

    def _before_first_prompt(self, cache: Any, ids: Any) -> None:
        if not self._has_served and cache is not None and ids is not None:
            self._has_served, layers = True, packed_layers(cache)
            num_heads = getattr(self._model.config.get_text_config(decoder=True), "num_attention_heads", None)
            attends = isinstance(num_heads, int) and not expects_first_prompt(layers, ids.shape[1])
            precompile_prompt(layers, ids, num_heads if attends else None, exact=self._is_exact)

    @contextmanager
    def _requested(self, request: Request) -> Iterator[Request]:
        """Runs ``request`` in this thread, perhaps nested in another request, and then keeps its cache's memory."""
        outer, self._of_thread.request = self._request, request
        request.records = self._steps.begin_recording()
        try:
            yield request
        finally:
            self._of_thread.request = outer
            if request.records:
                self._steps.end_recording()
            if request.served is not None:
                expect_other_tokens(packed_layers(request.served))
                self._caches.give_back(request.served)

    @property
    def _request(self) -> Request | None:
        """The request that runs in this thread."""
        return getattr(self._of_thread, "request", None)

    def _original(self, name: str) -> Callable[..., Any]:
        """The method ``name`` of the model, before it was replaced."""
        return self._before[name] or MethodType(getattr(type(self._model), name), self._model)

    def _why_unchanged(self, request: Request, config: Any, mode: str) -> str | None:
        """Why a request is left to Transformers, as documented; None if kvcompile tries to serve it."""
        if request.is_custom:
            return _BY_THE_CALLER
        if request.failed is not None:
            reason = f"its first call fails with a packed static cache ({request.failed})"
            self._explain(request, reason)
            return reason
        if config.use_cache is False:
            return "use_cache is False"
        if config.is_assistant:  # it passes the same cache to a series of growing requests
            return "it assists another model"
        if config.cache_implementation not in _SERVED_CACHES:
            return f"cache_implementation is {config.cache_implementation!r}; leave it out"
        if mode not in _SERVED_MODES:
            return f"kvcompile does not serve the mode {mode}"
        if "mamba" in type(self._model).__name__.lower():
            return "it is a state-space model, whose cache has no keys and values"
        return None

    def _taken(self, request: Request, num_sequences: int, num_tokens: int, mode: str) -> Any:
        """An empty packed cache for a request, or None if the model or the mode does not allow it."""
        state = self._caches.state()
        cache: Any = None
        reason = self._refused.get(state)
        if reason is None and attends_by_flex(self._model.config):
            reason = WHY_NOT_FLEX  # a later request may attend otherwise
        if reason is None and has_active_dropout(self._model):
            reason = WHY_NOT_TRAINING  # a later request may run without dropout
        if reason is None:
            cache, reason = self._taken_or_refused(num_sequences, num_tokens)
            if reason is not None:
                self._refused[state] = reason
        if cache is not None:
            self._steps.never_record_states(findings_of(cache).states, state.device)
        if cache is not None and mode == _ASSISTED and not can_crop(cache):
            cache, reason = None, why_no_crop(cache)
        if reason is not None:
            self._explain(request, reason)
        return cache

    def _taken_or_refused(self, num_sequences: int, num_tokens: int) -> tuple[Any, str | None]:
        """An empty packed cache and None; or None and why no request to the model in its present state gets one."""
        if not makes_dynamic_caches(self._model):
            return None, _CACHE_OF_THE_MODEL
        try:
            cache = self._caches.take(num_sequences, num_tokens)
        except PolicyError:
            raise
        except KVCompileError as error:
            return None, str(error)
        plain = why_plain(cache)
        if not self._caches.has_packed_layers(cache):
            return None, self._caches.why_not_packed(cache) or plain or _PACKS_NOTHING
        if plain is not None and self._options.on_unsupported != "ignore":
            self._note(f"generate() of this {type(self._model).__name__} leaves layers plain: {plain}")
        return cache, None

    def _explain(self, request: Request, reason: str) -> None:
        """Say in the report why a request gets no packed cache, and once in a log. A policy may leave caches plain."""
        request.plain_because = reason
        if reason != _PACKS_NOTHING:
            self._note(self._sentence(reason))

    def _note(self, text: str) -> None:
        """Say something in the reports, and once in a log."""
        report.note(text, logs=text not in self._explained)
        self._explained.add(text)

    def _sentence(self, reason: str) -> str:
        return f"generate() of this {type(self._model).__name__} runs without a packed cache: {reason}"

    def _count(self, request: Request) -> None:
        """Count a finished request in the reports. A model that contains the one that decodes has no request itself."""
        if request.has_compiled_step:
            report.served_by_steps()
        elif packed_layers(request.cache):
            report.served_eagerly()
        elif request.has_prepared or request.is_custom:
            report.served_plainly(self._sentence(request.plain_because or _NO_COMPILED_STEP))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _counted(cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
    """A context for a compiled call, in which windows of ``cache`` that move by blocks find room for its new tokens."""
    ids = kwargs.get("input_ids", next(iter(args), None))
    tokens = kwargs.get("inputs_embeds") if ids is None else ids
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        return nullcontext()
    return prepared_for_step(cache, tokens.shape[1])


def _look_at_keys(model: nn.Module, cache: Any) -> Callable[[Any, torch.Tensor], None]:
    """A function that looks for outliers in the new keys of a layer, before they are packed into ``cache``."""
    modules = attention_modules(model)
    names = {id(layer): modules.get(index, "") for index, layer in enumerate(cache.layers)}

    def look(layer: Any, keys: torch.Tensor) -> None:
        if found := examine(keys, layer.keys.packed_layout.format_name, names[id(layer)]):
            report.note(str(found))

    return look


def generative_models(model: Any) -> list[Any]:
    """The Transformers models whose ``generate()`` may run when ``model`` generates; an outer model comes first.

    It is ``model`` alone, unless ``model`` has a ``generate()`` of its own, such as a PEFT model with adapters or
    BLIP-2. Then the decoders that it contains may follow. Empty if ``model`` does not generate, or is an
    encoder-decoder.
    """
    mixin = _generation_mixin(model)
    if mixin is None and not callable(getattr(model, "generate", None)):
        return []
    own = [model] if is_generative(model) else []
    if mixin is not None and (not own or type(model).generate is mixin.generate):
        return own
    return own + _outermost([module for module in model.modules() if module is not model and is_generative(module)])


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that no other one of ``modules`` contains."""
    inner = {module for outer in modules for module in outer.modules() if module is not outer}
    return [module for module in modules if module not in inner]


def is_generative(model: Any) -> bool:
    """Whether ``model`` is a Transformers model that generates with one cache, not an encoder-decoder."""
    return _generation_mixin(model) is not None and not model.config.is_encoder_decoder


def _generation_mixin(model: nn.Module) -> Any:
    """The class from which ``model`` inherits ``generate()``; None for other models."""
    return next((cls for cls in type(model).__mro__ if cls.__name__ == "GenerationMixin"), None)


def _forwarding(name: str, model: nn.Module) -> Callable[..., Any]:
    """A method of ``model`` that calls the Generation's method, or the class's method in a copy of ``model``."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        generation = Generation.of(self)
        if generation is None:
            return getattr(type(self), name)(self, *args, **kwargs)
        return getattr(generation, _METHODS[name])(*args, **kwargs)

    setattr(forward, _FORWARDS, True)
    forward.__name__ = name  # pickle stores a method by name, so a copy gets the method of its class
    return MethodType(forward, model)
