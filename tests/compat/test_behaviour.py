"""PyTorch uses the names in ``kvcompile/compat`` as expected. If PyTorch renamed them, nothing would raise an error."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.backends import registry
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import cpu_vec_isa, cudagraph_trees
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

import kvcompile
from kvcompile import KVCompileError, compat, kvquant
from kvcompile.compat import (
    ahead_of_time,
    attention,
    backends,
    cuda_graphs,
    guards,
    inductor,
    modules,
    observing,
    recompiling,
    stop_checks,
    tensors,
    tracing,
    triton_names,
    vector_instructions,
)
from kvcompile.compat.backends import ensure_registered
from kvcompile.compat.dimension_marks import drop_marks, mark_weakly_dynamic
from kvcompile.compat.tracing import FakeTensorMode, fake_errors_unlogged
from kvcompile.compat.transformers import promises_static_caches
from kvcompile.kernels.lang.triton import triton

MODULES = [one.name for one in pkgutil.iter_modules(compat.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_every_name_exists(name: str) -> None:
    if name == "gluon" and triton is None:
        pytest.skip("needs Triton")
    importlib.import_module(f"kvcompile.compat.{name}")
    assert recompiling.missing_names() == []


def test_attention_by_cudnn_has_the_parameters_that_are_passed() -> None:
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    assert [argument.name for argument in schema.arguments] == [
        *("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
        *("return_debug_mask", "scale"),
    ]
    query, cache = torch.zeros(1, 4, 3, 64), torch.zeros(1, 2, 3, 64)
    assert not attention.cudnn_serves(query, cache, cache, is_causal=True)  # there is no cuDNN on a CPU


@pytest.mark.parametrize(
    ("function", "arguments", "keywords"),
    [
        (inductor.compile_fx, 2, ["inner_compile", "config_patches"]),
        (inductor.compile_fx_inner, 2, ["static_input_idxs", "cudagraphs"]),
        (inductor.select_decomp_table, 0, []),
        (inductor.fx_graph_cse, 1, []),
        (inductor.BoxedBool, 1, []),
        (observing.dynamo_timed, 1, []),
        (observing.trace_structured, 1, ["metadata_fn", "payload_fn"]),
        (observing.lazy_format_graph_code, 2, []),
        (tensors.new_wrapper, 2, ["dtype", "device"]),
        (convert_frame.register_bytecode_hook, 1, []),
        (eval_frame._callback_from_stance, 1, []),
        (eval_frame.innermost_backend, 1, []),
        (PyCodeCache.load_by_key_path, 4, []),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_functions_take_the_arguments_that_they_get(
    function: Callable[..., Any], arguments: int, keywords: list[str]
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        pytest.skip("written in C++")
    signature.bind(*range(arguments), **dict.fromkeys(keywords))


def test_transformers_says_which_models_run_with_static_caches() -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers.LlamaForCausalLM._can_compile_fullgraph
    assert promises_static_caches(transformers.LlamaForCausalLM)
    assert not promises_static_caches(transformers.GPTNeoForCausalLM)
    assert promises_static_caches(nn.Linear), "classes of other packages are not checked"


def test_transformers_has_a_deferred_check_with_the_parameters_that_are_passed() -> None:
    pytest.importorskip("transformers")
    from transformers.generation import GenerationMixin, MaxLengthCriteria, utils

    check: Any = getattr(utils, "DeferredStopCheck")  # noqa: B009
    check = next(cls for cls in check.__mro__ if cls.__module__ == utils.__name__)  # under the class of kvcompile
    assert list(inspect.signature(check.is_supported).parameters) == [
        "device", "cache", "cache_is_returned", "is_assistant",
    ]  # fmt: skip
    assert list(inspect.signature(check).parameters)[:4] == ["input_ids", "max_length", "cache", "cache_is_returned"]
    assert callable(getattr(GenerationMixin, stop_checks.STOPPING_CRITERIA))
    assert not stop_checks.may_end_early([MaxLengthCriteria(4)])


def test_requests_ask_after_each_token_without_the_deferred_check(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from transformers.generation import utils

    monkeypatch.delattr(utils, "DeferredStopCheck")
    stop_checks._replace_check.__wrapped__()
    assert not hasattr(utils, "DeferredStopCheck")


def test_a_view_in_a_dtype_of_another_size_is_a_method_call_in_generated_code() -> None:
    def two_views(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int32) + (x + 1).view(torch.int32)

    x = torch.randint(0, 255, (3, 8), dtype=torch.uint8)
    with inductor.views_by_method():
        result, (code,) = run_and_get_code(torch.compile(two_views, options={"fx_graph_cache": False}), x)
    assert torch.equal(result, two_views(x))
    assert code.count("torch.Tensor.view(") == 2
    assert "aten.view.dtype(" not in code
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(two_views, options={"fx_graph_cache": False}), x)
    assert code.count("aten.view.dtype(") == 2, "code that others compile is the same as before"


def test_pytorch_looks_up_these_names_in_our_classes() -> None:
    assert "_boxed_call" in inspect.getsource(aot_autograd)
    if torch.__version__ >= "2.13":  # older releases keep graphs with tensor subclasses out of this cache
        assert "_stable_hash_for_caching" in inspect.getsource(autograd_cache)


def test_a_weak_mark_makes_a_size_symbolic_and_a_dropped_mark_does_not() -> None:
    graphs: list[Any] = []

    def symbolic(mark: Callable[[torch.Tensor], Any]) -> bool:
        torch._dynamo.reset()
        x = torch.ones(5, 3)
        mark(x)
        torch.compile(torch.cos, backend=lambda gm, inputs: graphs.append(inputs) or gm.forward, dynamic=None)(x)
        return any(isinstance(one, torch.SymInt) for one in graphs[-1])

    def marked_and_dropped(x: torch.Tensor) -> None:
        mark_weakly_dynamic(x, 0)
        drop_marks(x)

    assert symbolic(lambda x: mark_weakly_dynamic(x, 0))
    assert not symbolic(marked_and_dropped)
    assert not symbolic(lambda x: None)


def test_users_of_a_storage_are_counted() -> None:
    x = torch.ones(4)
    assert tensors.num_users(x) == 1
    alias = x.detach()
    assert tensors.num_users(x) == 2
    view = alias[1:]
    assert tensors.num_users(x) == 3
    del alias, view
    assert tensors.num_users(x) == 1
    storage = x.untyped_storage()
    assert tensors.num_users(x) == 2
    del storage
    assert tensors.num_users(x) == 1
    assert x.untyped_storage().nbytes() == 16


def test_only_tensors_on_one_storage_have_one_identifier() -> None:
    with tracing.FakeTensorMode():
        one, other = torch.ones(4), torch.ones(4)
        assert tensors.storage_id(one) == tensors.storage_id(one[1:])
        assert tensors.storage_id(one) != tensors.storage_id(other)


@pytest.mark.parametrize("is_registered", [True, False])
def test_dynamo_drops_its_references_only_after_a_registered_backend(is_registered: bool) -> None:
    class Backend:
        def __call__(self, gm: Any, inputs: Any) -> Any:
            if is_registered:
                ensure_registered(self, f"kvcompile-test-{id(self)}")
            return gm.forward

    x = torch.ones(3)
    torch.compile(torch.cos, backend=Backend())(x)
    assert bool(weakref.getweakrefs(x)) is not is_registered


def test_all_fake_modes_forget_a_tensor_and_know_others_as_before() -> None:
    modes = [FakeTensorMode(), FakeTensorMode()]
    dropped, kept = torch.ones(3), torch.ones(4)
    fakes = [mode.from_tensor(kept) for mode in modes]
    for mode in modes:
        mode.from_tensor(dropped)
    assert weakref.getweakrefs(dropped)
    tracing.forget_in_fake_modes([dropped])
    assert not weakref.getweakrefs(dropped)
    assert all(mode.from_tensor(kept) is fake for mode, fake in zip(modes, fakes, strict=True))
    assert modes[0].from_tensor(dropped).shape == (3,)


@pytest.mark.skipif(not ahead_of_time.CAN_STORE_CALLS, reason="this release has no aot_compile")
def test_only_aot_compile_asks_for_a_function_that_can_be_stored() -> None:
    seen = []

    class Stored(ahead_of_time.StorableCall):
        """Has the two methods that PyTorch calls; without one of them it could not be instantiated."""

        serialize_compile_artifacts = deserialize_compile_artifacts = classmethod(lambda cls, fn: b"")

        def __init__(self, gm: Any, inputs: Any) -> None:
            self.call = gm.forward
            seen.append(ahead_of_time.is_ahead_of_time())
            tracing.forget_real_tensors(gm)

        def __call__(self, *args: Any) -> Any:
            return self.call(*args)

    x = torch.ones(3)
    torch.compile(torch.tanh, backend=Stored, dynamic=False)(x)
    with torch._dynamo.config.patch(enable_aot_compile=True):
        function = torch.compile(torch.sin, backend=Stored, fullgraph=True, dynamic=False).aot_compile(((x,), {}))
    assert torch.equal(function(x), torch.sin(x))
    assert seen == [False, True]
    assert not weakref.getweakrefs(x)
    required = Stored.__mro__[1].__abstractmethods__
    assert required == {"serialize_compile_artifacts", "deserialize_compile_artifacts", "__call__"}


def test_two_threads_that_look_up_the_backend_first_at_the_same_time_both_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo looks for a name, loads the entry point and registers it, without a lock."""
    both_loaded = threading.Barrier(2)

    class EntryPoint:
        def load(self) -> Any:
            both_loaded.wait(60)
            return kvquant

    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
    monkeypatch.setitem(registry._BACKENDS, "kvquant", EntryPoint())
    registry._COMPILER_FNS.pop("kvquant", None)
    backends.allow_registration_by_threads()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(registry.lookup_backend, 2 * ["kvquant"])) == [kvquant, kvquant]


def test_a_compiled_module_is_found_and_restored() -> None:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    assert modules.is_compiled_in_place(module)
    modules.drop_compiled_call(module)
    assert not modules.is_compiled_in_place(module)
    assert modules.original_module(torch.compile(module)) is module


def test_without_a_name_that_only_debug_needs_debug_alone_fails(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(eval_frame, "_debug_get_cache_entry_list")
    assert torch.equal(torch.compile(torch.cos, backend="kvquant")(torch.zeros(2)), torch.ones(2))
    with (
        pytest.raises(KVCompileError, match=r"debug\(\) needs torch._dynamo.eval_frame._debug_get_cache_entry_list"),
        kvcompile.debug(tmp_path),
    ):
        pass


def test_a_widened_guard_admits_what_its_check_admits() -> None:
    def backend(gm: GraphModule, inputs: Any) -> GraphModule:
        (x,) = gm.graph.find_nodes(op="placeholder")
        guards.widen_tensor_guards({x: lambda own: lambda value: own(value) or value.dtype == torch.float64}, "floats")
        return gm

    run = torch.compile(lambda x: x + 1, backend=backend)
    run(torch.zeros(2))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert run(torch.zeros(3, dtype=torch.float64)).shape == (3,)
        for other in (torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
            with pytest.raises(RuntimeError, match="recompile"):
                run(other)


def test_dynamo_says_which_module_it_traces() -> None:
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(modules.traced_module())
        return gm

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.half(x) + self.half(x)

        def half(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        def third(this, x: torch.Tensor) -> torch.Tensor:
            return x / 3

    module = Doubled()
    methods = (torch.compile(method, backend=backend) for method in (module.half, module.third))
    calls = (torch.compile(module, backend=backend), module, *methods)
    module.compile(backend=backend)
    for call in (*calls, torch.compile(lambda x: x + 1, backend=backend)):
        torch._dynamo.reset()  # another call of the same code would be served by the graph of the first
        call(torch.zeros(2))
    assert found == [module, module, module, module, None]
    assert modules.traced_module() is None


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the instruction set of the test")
@pytest.mark.parametrize(("works", "number_of_tests"), [(True, 1), (False, 3)])
def test_the_best_instructions_are_tested_and_others_only_if_they_fail(
    works: bool, number_of_tests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[Any] = []

    class Instructions(cpu_vec_isa.VecISA):
        def __str__(self) -> str:
            return "avx2"

        def check_build(self, code: str) -> bool:
            tested.append(self)
            return works or self is not best

    sets = [best, *_] = [Instructions() for _ in range(3)]
    for module in (cpu_vec_isa, vector_instructions):
        monkeypatch.setattr(module, "supported_vec_isa_list", sets)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": None, "cpp.simdlen": None}):
        vector_instructions.check_best_instructions_only()
        trusted = cpu_vec_isa.valid_vec_isa_list.__wrapped__()
    assert tested == sets[:number_of_tests]
    assert trusted == (sets if works else sets[1:])


@pytest.mark.parametrize("chosen", [{"cpp.vec_isa_ok": False}, {"cpp.simdlen": 1}])
def test_a_choice_of_instructions_stays(chosen: dict[str, Any]) -> None:
    with torch._inductor.config.patch({"cpp.vec_isa_ok": None, **chosen}):
        before = torch._inductor.config.cpp.vec_isa_ok
        vector_instructions.check_best_instructions_only()
        assert torch._inductor.config.cpp.vec_isa_ok is before


def test_errors_of_cuda_graphs_come_from_the_file_with_the_message_that_is_looked_for() -> None:
    """Reading a tensor that a replay has overwritten raises this message."""
    source = inspect.getsource(cudagraph_trees)
    assert inspect.getfile(cudagraph_trees).endswith(f"/{cuda_graphs._TREES}")
    assert callable(getattr(cudagraph_trees.CUDAGraphTreeManager, cuda_graphs._WITHOUT_RECORDING))
    assert cuda_graphs._OVERWRITTEN in source
    assert cuda_graphs._INDUCTOR_ERROR != ()


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_has_the_names_that_kernels_and_packages_use() -> None:
    assert {"is_cuda", "cuda_capability_geq"} <= set(dir(triton_names.target_info))
    assert triton_names.gdc_wait is not None
    assert triton_names.gdc_launch_dependents is not None
    assert list(inspect.signature(triton.JITFunction.warmup).parameters) == ["self", "args", "grid", "kwargs"]


@pytest.mark.parametrize("value", ["0", "1"])
def test_triton_reads_whether_it_is_interpreted(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert triton_names.is_interpreted() is (triton is not None and value == "1")
    monkeypatch.delattr(triton, "knobs", raising=False)
    assert triton_names.is_interpreted() is (triton is not None and value == "1")


def test_an_error_on_fake_tensors_is_logged_unless_it_is_expected(caplog):
    def fail():
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ops.aten._grouped_mm(torch.ones(2, 2), torch.ones(2, 2))

    with fake_errors_unlogged():
        fail()
    assert not caplog.records
    fail()
    assert "failed while attempting to run meta" in caplog.text
