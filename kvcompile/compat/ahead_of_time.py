"""Private names of ``aot_compile``, with which a user stores a compiled function in a file.

Without one of them ``aot_compile`` reports that kvcompile's function is not serializable. All else works.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch._functorch.config as settings
import torch._inductor.config

try:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable
    from torch._functorch._aot_autograd.aot_autograd_result import BundledCompiledForward

    CAN_STORE_CALLS = hasattr(settings, "force_autograd_cache") and hasattr(settings, "bundled_autograd_cache")
except ImportError:
    CAN_STORE_CALLS = False
    BundledAOTAutogradSerializableCallable = BundledCompiledForward = None  # type: ignore[misc,assignment]
    SerializableCallable = object  # type: ignore[misc,assignment]

StorableCall = SerializableCallable
"""The class of functions that ``aot_compile`` can store. Two class methods turn a function into bytes and back."""


def is_ahead_of_time() -> bool:
    """Whether ``aot_compile`` calls the backend. It is the only caller that sets both of these settings."""
    return CAN_STORE_CALLS and bool(settings.force_autograd_cache and settings.bundled_autograd_cache)


def keeping_code() -> AbstractContextManager[Any]:
    """Let AOTAutograd keep the object that the inner compiler returns, even if its cache is off."""
    return settings.patch(enable_autograd_cache=True, bundled_autograd_cache=True)


def is_kept(compiled: Callable[..., Any]) -> bool:
    """Whether AOTAutograd has kept the code of ``compiled``, a result of ``compile_fx``."""
    return getattr(compiled, "serialize", None) is not None


def bytes_of(compiled: Callable[..., Any]) -> bytes:
    """The bytes of a result of ``compile_fx`` for which :func:`is_kept` is true."""
    stored = BundledAOTAutogradSerializableCallable(compiled)
    data: bytes = BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(stored)
    return data


def code_of_bytes(data: bytes, inductor_config: dict[str, Any]) -> Any:
    """The function whose :func:`bytes_of` are ``data``. It was compiled with these settings of Inductor."""
    with torch._inductor.config.patch(inductor_config):
        return BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(data)


def entry_with_code(compiled: Any) -> Any:
    """An entry that holds the code itself. Its ``load`` and ``post_compile`` give the code to a process."""
    entry = BundledCompiledForward(compiled)
    entry.pre_save()
    return entry
