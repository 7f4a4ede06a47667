"""The settings that make compilation in tests cheaper change no result."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from cheaper_compilation import _can_bind_kernels_together, in_one_piece_of_stack
from shared_fixtures import WITHOUT_VECTORS, with_vectors, without_kernels_of_inductor
from torch._decomp.decompositions_for_rng import PhiloxState
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import run_and_get_code
from torch.utils._config_module import ConfigModule


def depth(remaining: int, *, found: int = 0) -> int:
    return depth(remaining - 1, found=found + 1) if remaining else found


def test_a_function_in_one_piece_of_stack_returns_and_raises_the_same() -> None:
    assert in_one_piece_of_stack(depth)(700, found=3) == 703
    assert in_one_piece_of_stack(depth).__name__ == "depth"
    with pytest.raises(RecursionError):
        in_one_piece_of_stack(depth)(10**6)


def test_a_test_runs_in_a_frame_that_needs_a_separate_piece() -> None:
    assert max(frame.frame.f_code.co_stacksize for frame in inspect.stack(0)) >= 2**17


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
def test_settings_are_read_as_pytorch_reads_them() -> None:
    read = ConfigModule.__getattr__.__wrapped__
    for config in (torch._dynamo.config, torch._functorch.config, torch._inductor.config):
        for name in config._config:
            try:
                expected = read(config, name)
            except Exception as error:
                with pytest.raises(type(error)):
                    getattr(config, name)
            else:
                assert getattr(config, name) == expected, name
    with pytest.raises(AttributeError, match="no_such_setting does not exist"):
        _ = torch._dynamo.config.no_such_setting


def test_changes_of_a_setting_are_seen_and_undone() -> None:
    config = torch._dynamo.config
    before = config.recompile_limit
    with config.patch(recompile_limit=before + 1):
        assert config.recompile_limit == before + 1
        config.recompile_limit = before + 2
        assert config.recompile_limit == before + 2
    assert config.recompile_limit == before
    del config.recompile_limit
    assert not hasattr(config, "recompile_limit")
    config.recompile_limit = before
    assert config.recompile_limit == before


def test_graphs_with_the_same_python_share_bytecode_but_no_values() -> None:
    def graph_of(value: float) -> torch.fx.GraphModule:
        return torch.fx.symbolic_trace(Adding(value))

    one, two = graph_of(1.0), graph_of(2.0)
    assert type(one).forward.__code__ is type(two).forward.__code__
    assert (one(torch.zeros(())).item(), two(torch.zeros(())).item()) == (1.0, 2.0)


class Adding(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value


def test_states_of_random_numbers_begin_as_pytorch_resets_them() -> None:
    state, expected = PhiloxState(), PhiloxState()
    PhiloxState.reset.__wrapped__(expected)
    assert vars(state).keys() == vars(expected).keys()
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(state, name), value)


def test_kernels_have_vector_instructions_where_a_test_asks_for_them() -> None:
    config = torch._inductor.config.cpp
    assert config.simdlen == 1
    with with_vectors():
        assert config.simdlen is None  # what users have
    assert config.simdlen == 1


@pytest.mark.slow
def test_kernels_of_slow_tests_have_vector_instructions() -> None:
    assert torch._inductor.config.cpp.simdlen is None


@pytest.mark.usefixtures("fresh_compiler")
def test_code_without_kernels_or_vectors_computes_the_same() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2 + x.cos()).softmax(-1)

    x = torch.randn(3, 40)
    _, (scalar,) = run_and_get_code(torch.compile(fn, options=WITHOUT_VECTORS), x)
    assert "at::vec" not in scalar
    torch.testing.assert_close(torch.compile(fn, options=WITHOUT_VECTORS)(x), fn(x))
    torch._dynamo.reset()
    with without_kernels_of_inductor():
        result, (code,) = run_and_get_code(torch.compile(fn), x)
    torch.testing.assert_close(result, fn(x))
    if hasattr(torch._inductor.config, "fallback_by_default"):
        assert "cpp_pybinding(" not in code


@pytest.mark.usefixtures("fresh_compiler")
def test_the_kernels_of_a_graph_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have different arguments, and the error of one kernel reaches the caller."""
    loaded: list[str] = []
    load = CppPythonBindingsCodeCache.load_async

    def remember(source: str, *args: Any, **how: Any) -> Any:
        loaded.append(source)
        return load(source, *args, **how)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", remember)

    def fn(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x.softmax(-1) @ y.sin())[index] + 1

    args, index = (torch.randn(5, 7), torch.randn(7, 3)), torch.tensor([4, 0])
    run = torch.compile(fn, dynamic=True)
    result, (code,) = run_and_get_code(run, *args, index)
    torch.testing.assert_close(result, fn(*args, index))
    if _can_bind_kernels_together(AsyncCompile, CppPythonBindingsCodeCache):
        assert code.count("async_compile.cpp_pybinding(") > len(loaded) == 1
    with pytest.raises((IndexError, RuntimeError), match="index out of bounds"):
        run(*args, torch.tensor([5, 0]))


def test_each_kernel_is_a_program_in_a_release_without_the_names_that_bind_several() -> None:
    class Other:
        suffix_template = "{module_name}"

    assert not _can_bind_kernels_together(AsyncCompile, Other)
    assert not _can_bind_kernels_together(None, CppPythonBindingsCodeCache)
