"""Recompile functions inside a block, and keep the code that Dynamo compiled for them before.

Dynamo stores compiled code on the code objects of functions. It reuses this code if the guards hold and the backend is
the same (``_torchdynamo_orig_backend`` of the callback that compiles frames). Inside the block, every backend is
wrapped in an object that equals only wrappers of the same block. Dynamo therefore reuses no code from before the block.
It does reuse code from the block, so nothing is compiled twice. The wrapped backend, its options and its hooks are
unchanged. After the block, Dynamo finds the earlier code again, and the block's code is dropped.
``torch._dynamo.reset()`` would drop everything.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any
from unittest import mock

import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch._dynamo import convert_frame, eval_frame, guards
from torch._inductor import codecache

_NEEDED = {
    eval_frame: ("_callback_from_stance", "_debug_get_cache_entry_list", "innermost_backend"),
    convert_frame: ("register_bytecode_hook",),
    guards: ("DeletedGuardManagerWrapper",),
    codecache: ("PyCodeCache",),
}
"""The names that only ``debug()`` needs: callbacks, cache entries, hooks, and the loader of generated code."""

_NO_LIMIT = 1 << 30


def missing_names() -> list[str]:
    """The names that ``debug()`` needs and that are missing in this release of PyTorch."""
    return [f"{module.__name__}.{name}" for module in _NEEDED for name in _NEEDED[module] if not hasattr(module, name)]


def code_loader() -> Any:
    """Inductor's class with ``load_by_key_path``, which loads a file of generated code."""
    return codecache.PyCodeCache


@contextlib.contextmanager
def recompiling() -> Iterator[None]:
    """Inside the ``with`` block, recompile every compiled function that a thread calls, without caches of code."""
    compiled: list[CodeType] = []

    def remember(code: CodeType, new_code: CodeType) -> None:
        compiled.append(code)

    unchanged = eval_frame._callback_from_stance
    block = object()

    def callback_from_stance(callback: Any) -> Any:
        callback = unchanged(callback)
        # None and False mean that nothing is compiled. A nested call that returns passes a callback of this block.
        if not callable(callback) or isinstance(callback, _Recompile):
            return callback
        return _Recompile(callback, block)

    handle = convert_frame.register_bytecode_hook(remember)
    try:
        with mock.patch.object(eval_frame, "_callback_from_stance", callback_from_stance):
            yield
    finally:
        handle.remove()
        for code in dict.fromkeys(compiled):
            _drop_code_of(block, code)


def with_new_code(function: Any, name: str) -> Any:
    """``function`` on a new code object called ``name``, on which Dynamo has stored no code yet."""
    function.__code__ = function.__code__.replace(co_name=name)
    return function


def without_recompile_limit() -> contextlib.AbstractContextManager[None]:
    """Lift Dynamo's limits on the number of recompilations in this thread."""
    return torch._dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT)


@contextlib.contextmanager
def _without_caches() -> Iterator[None]:
    """Switch off Inductor's and AOTAutograd's caches and Dynamo's limits on recompilations, in this thread."""
    with (
        without_recompile_limit(),
        torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        yield


class _BackendOfBlock:
    """A backend wrapped for one block: it equals wrappers of the same backend in the same block, and nothing else."""

    def __init__(self, backend: Callable[..., Any], block: object) -> None:
        self.backend = backend
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.backend(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BackendOfBlock) and other.block is self.block and other.backend == self.backend

    __hash__ = None  # type: ignore[assignment]


class _Recompile:
    """Dynamo's callback that compiles a frame, with its backend wrapped for a block."""

    def __init__(self, callback: Callable[..., Any], block: object) -> None:
        self._callback = callback
        self._torchdynamo_orig_backend = _BackendOfBlock(eval_frame.innermost_backend(callback), block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _without_caches():  # set in the thread that compiles, because these settings are per thread
            return self._callback(*args, **kwargs)


def _drop_code_of(block: object, code: CodeType) -> None:
    """Drop the code that was compiled for ``code`` in the block, as Dynamo does when a guarded object dies."""
    for entry in eval_frame._debug_get_cache_entry_list(code):
        backend = entry.backend
        if not isinstance(backend, _BackendOfBlock) or backend.block is not block:
            continue
        dropped = guards.DeletedGuardManagerWrapper("it was compiled inside kvcompile.debug")
        # The empty entry stays in the list. It does not count toward recompile_limit: no frame has the object that it
        # matches.
        dropped.id_matched_objs = {"": weakref.ref(_BackendOfBlock)}
        owner = entry.guard_manager.extra_state
        if owner is not None:
            owner.invalidate(entry, dropped)
