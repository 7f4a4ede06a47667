"""Compile anew, in a block, what Dynamo has compiled before, and leave the earlier code untouched.

Dynamo keeps compiled code on the code objects of functions, and finds it again if its guards hold and it was compiled
for the same backend (``_torchdynamo_orig_backend`` of the callback that compiles frames). Inside the block every
backend passes for another one: nothing compiled before is found, and the backend itself, its options and hooks are what
they were. The same code then finds its own again, so that nothing is compiled twice in a block. Afterwards the earlier
code is found as ever, and the block's code is dropped. ``torch._dynamo.reset()`` would have dropped everything.
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
from torch._dynamo import eval_frame
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.guards import DeletedGuardManagerWrapper

_NO_LIMIT = 1 << 30


@contextlib.contextmanager
def compiling_anew() -> Iterator[None]:
    """Compile anew, without caches of compiled code, whatever any thread runs compiled inside the block."""
    compiled: list[CodeType] = []

    def remember(code: CodeType, new_code: CodeType) -> None:
        compiled.append(code)

    unchanged = eval_frame._callback_from_stance
    block = object()

    def callback_from_stance(callback: Any) -> Any:
        callback = unchanged(callback)
        # None and False: nothing is compiled. A callback of this block comes again when a nested call returns.
        if not callable(callback) or isinstance(callback, _CompileAnew):
            return callback
        return _CompileAnew(callback, block)

    handle = register_bytecode_hook(remember)
    try:
        with mock.patch.object(eval_frame, "_callback_from_stance", callback_from_stance):
            yield
    finally:
        handle.remove()
        for code in dict.fromkeys(compiled):
            _drop_code_of(block, code)


def with_new_code(function: Any, name: str) -> Any:
    """``function`` on a new code object called ``name``: Dynamo finds nothing there and leaves nothing behind."""
    function.__code__ = function.__code__.replace(co_name=name)
    return function


def without_recompile_limit() -> contextlib.AbstractContextManager[None]:
    """What this thread compiles is not limited in number."""
    return torch._dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT)


@contextlib.contextmanager
def _without_caches() -> Iterator[None]:
    """Neither Inductor's nor AOTAutograd's caches serve what this thread compiles; nor is it limited in number."""
    with (
        without_recompile_limit(),
        torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        yield


class _BackendOfBlock:
    """What a backend passes for inside a block: equal to itself there, and to nothing outside."""

    def __init__(self, backend: Callable[..., Any], block: object) -> None:
        self.backend = backend
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.backend(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BackendOfBlock) and other.block is self.block and other.backend == self.backend

    __hash__ = None  # type: ignore[assignment]


class _CompileAnew:
    """Dynamo's callback that compiles a frame, for a backend that passes for another."""

    def __init__(self, callback: Callable[..., Any], block: object) -> None:
        self._callback = callback
        self._torchdynamo_orig_backend = _BackendOfBlock(eval_frame.innermost_backend(callback), block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _without_caches():  # here, because settings hold for the thread that makes them
            return self._callback(*args, **kwargs)


def _drop_code_of(block: object, code: CodeType) -> None:
    """Drop what was compiled for ``code`` in the block, as Dynamo does when an object that it guards on dies."""
    for entry in eval_frame._debug_get_cache_entry_list(code):
        backend = entry.backend
        if not isinstance(backend, _BackendOfBlock) or backend.block is not block:
            continue
        dropped = DeletedGuardManagerWrapper("it was compiled inside kvcompile.debug")
        # The empty entry stays in the list. An object that no frame has keeps it from counting to recompile_limit.
        dropped.id_matched_objs = {"": weakref.ref(_BackendOfBlock)}
        owner = entry.guard_manager.extra_state
        if owner is not None:
            owner.invalidate(entry, dropped)
