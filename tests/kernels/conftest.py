"""Where tests of Triton kernels run: compiled on a GPU, or interpreted on a CPU.

``TRITON_INTERPRET`` must be set before Triton is imported, and must not be set for Inductor. Without a GPU,
test_interpreter.py therefore runs these tests in separate processes, and other processes do not collect them.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from kernel_tests import KERNEL_TESTS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = [] if INTERPRETED or torch.cuda.is_available() else KERNEL_TESTS


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device that runs Triton kernels."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; test_interpreter.py runs this on a CPU")
    return torch.device(request.param)


@pytest.fixture
def poisoned_outputs():
    """Uninitialized tensors are full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def capability(request: pytest.FixtureRequest) -> int:
    """The compute capability for which kernels are compiled ahead of time."""
    return getattr(request, "param", 90)


@pytest.fixture
def compiled(capability: int, monkeypatch: pytest.MonkeyPatch):
    """The kernels that launchers have compiled for ``capability``, by name."""
    from aot_compilation import CompileOnly, stand_ins  # not above: it needs Triton

    return stand_ins(CompileOnly, capability, monkeypatch)


@pytest.fixture
def counted(capability: int, monkeypatch: pytest.MonkeyPatch):
    """One item for each version of a kernel that launchers would have compiled for ``capability``, by name."""
    from aot_compilation import CountOnly, stand_ins

    return stand_ins(CountOnly, capability, monkeypatch)


if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    # Triton 3.6 turns an array of one element into an index, which NumPy refuses since 2.4.
    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor_with_index(tensor, scope):
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor_with_index

    # At every call of a function the interpreter replaces the functions of the language. Within a launch they have been
    # replaced already, and looking for them takes longer than most functions.
    _patch_lang = interpreter._patch_lang

    @functools.cache
    def _languages_of(fn):
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def _patch_lang_where_it_is_not(fn):
        if any(tl.core.is_builtin(language.load) for language in _languages_of(fn)):
            return _patch_lang(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_lang_where_it_is_not

    # In the interpreter of Triton 3.9, the conjunction of a condition on a scalar and a condition on a tensor is an
    # integer, 0 or 1, which loads and stores refuse as a mask. In compiled kernels it is a mask.
    _load, _store = (
        interpreter.InterpreterBuilder.create_masked_load,
        interpreter.InterpreterBuilder.create_masked_store,
    )

    def _load_where(self, ptrs, mask, *how):
        return _load(self, ptrs, interpreter.TensorHandle(mask.data.astype(bool), tl.int1), *how)

    def _store_where(self, ptrs, value, mask, *how):
        return _store(self, ptrs, value, interpreter.TensorHandle(mask.data.astype(bool), tl.int1), *how)

    interpreter.InterpreterBuilder.create_masked_load = _load_where
    interpreter.InterpreterBuilder.create_masked_store = _store_where
