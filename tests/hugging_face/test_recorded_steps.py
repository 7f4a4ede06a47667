"""Decode steps that cannot be CUDA graphs run without them, and errors of CUDA graphs name the remedy.

On a CPU these tests let steps be recorded, which then run as compiled steps without CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.exc import InductorError

import kvcompile
from kvcompile import KVCompileError, collect_reports
from kvcompile.generation import decode_steps
from kvcompile.generation.generate import Generation

transformers = pytest.importorskip("transformers")
from sweep_library import architecture_of  # noqa: E402
from tiny_llama import attention_llama  # noqa: E402

LOSSLESS = "float32"


def generated(model: Any, **arguments: Any) -> Tensor:
    ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(1))
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **common, **arguments)


@pytest.fixture(autouse=True)
def _recording_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_steps, "RECORDING_DEVICES", ("cuda", "cpu"))


@pytest.fixture
def node_by_node(without_code_generation: None) -> None:
    """Graphs run node by node."""


@pytest.fixture
def cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was recorded, one element for every call of compiled code."""
    called: list[bool] = []
    compiled = decode_steps.DecodeSteps._compiled

    def compile_and_watch(steps: Any, backend: Any) -> Callable[..., Any]:
        run, records = compiled(steps, backend), bool(backend.options.inductor_config.get("triton.cudagraphs"))

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(records)
            return run(*args, **kwargs)

        return call

    monkeypatch.setattr(decode_steps.DecodeSteps, "_compiled", compile_and_watch)
    return called


def fail_with(model: Any, error: Callable[[], Exception] | Exception) -> None:
    """Let recorded steps of a compiled model fail."""

    def step(*args: Any, **kwargs: Any) -> Any:
        raise error if isinstance(error, Exception) else error()

    steps: Any = Generation.of(model)._steps  # type: ignore[union-attr]
    steps._recorded = step


def raised_in_the_file_of_cuda_graphs(function: str) -> Exception:
    code = f"def {function}(): raise AssertionError('a node is missing')"
    scope: dict[str, Any] = {}
    exec(compile(code, "/torch/_inductor/cudagraph_trees.py", "exec"), scope)
    with pytest.raises(AssertionError) as caught:
        scope[function]()
    return caught.value


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("node_by_node")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_model_with_states_in_its_modules_is_never_recorded(mode: str | None, cuda_graphs: list[bool]) -> None:
    """A replay would overwrite the states of RecurrentGemma, which are outputs of the step before."""
    plain, model = (architecture_of("recurrent_gemma").build("recurrent_gemma", "sdpa") for _ in range(2))
    kvcompile.compile(model, policy=LOSSLESS, mode=mode)
    with collect_reports() as report:
        for _ in range(2):
            assert torch.equal(generated(model), generated(plain))
    assert cuda_graphs == [False] * 6
    notes = [note for note in report.notes if "CUDA graphs" in note]
    assert notes == [
        "decode steps of this RecurrentGemmaForCausalLM run without CUDA graphs: it keeps states in attributes of its "
        "modules, such as model.layers.0.temporal_block.conv1d_state"
    ]


@pytest.mark.usefixtures("node_by_node")
@pytest.mark.parametrize(("mode", "records"), [(None, True), ("default", False), ("reduce-overhead", True)])
def test_other_models_are_recorded_unless_the_mode_says_otherwise(
    mode: str | None, records: bool, cuda_graphs: list[bool]
) -> None:
    generated(kvcompile.compile(attention_llama(num_layers=1), policy=LOSSLESS, mode=mode))
    assert cuda_graphs == [records] * 3


@pytest.mark.usefixtures("node_by_node")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize(
    "error",
    [
        InductorError(IndexError("list index out of range"), None),
        RuntimeError("Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run.\n"),
        raised_in_the_file_of_cuda_graphs("record_function"),
    ],
    ids=["Inductor", "an overwritten output", "recording"],
)
def test_an_error_of_a_recorded_step_names_the_remedy_and_later_requests_are_not_recorded(
    error: Exception, mode: str | None, cuda_graphs: list[bool]
) -> None:
    expected = generated(attention_llama(num_layers=1))
    model = kvcompile.compile(attention_llama(num_layers=1), policy=LOSSLESS, mode=mode)
    fail_with(model, error)
    with pytest.raises(KVCompileError, match=r"of LlamaForCausalLM failed with CUDA .*mode=\"default\"\)") as caught:
        generated(model)
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)
    assert cuda_graphs == []
    assert torch.equal(generated(model), expected)
    assert cuda_graphs == [False] * 3


@pytest.mark.usefixtures("node_by_node")
@pytest.mark.parametrize(
    "error",
    [
        ValueError("an error of the step"),
        torch.OutOfMemoryError("no memory"),
        KVCompileError("past the end"),
        raised_in_the_file_of_cuda_graphs("run_eager"),
    ],
)
def test_other_errors_of_a_recorded_step_are_unchanged(error: Exception) -> None:
    model = kvcompile.compile(attention_llama(num_layers=1), policy=LOSSLESS)
    fail_with(model, error)
    with pytest.raises(type(error)) as caught:
        generated(model)
    assert caught.value is error


def test_an_error_of_a_pass_of_inductor_is_told_from_others(fresh_compiler: None) -> None:
    """PyTorch raises it as the class that :mod:`kvcompile.compat.cuda_graphs` expects."""

    def fail(graph: Any) -> None:
        raise IndexError("list index out of range")

    model = kvcompile.compile(attention_llama(num_layers=1), policy=LOSSLESS)
    with config.patch(post_grad_custom_pre_pass=fail), pytest.raises(KVCompileError, match="failed with CUDA graphs"):
        generated(model)


def test_an_attention_that_must_be_packed_keeps_its_error(fresh_compiler: None) -> None:
    """With ``on_unsupported="error"`` the backend raises it, in the midst of Inductor's compilation."""
    model = kvcompile.compile(attention_llama(num_layers=1, head_dim=24), policy=LOSSLESS, on_unsupported="error")
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(Exception, match="head_dim 24 is not a multiple of 16") as caught:
        generated(model, past_key_values=cache)
    assert "CUDA graphs" not in str(caught.value)
