"""Marks in dumps: the rewritten graph and the generated code say what every store and attention is for."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile

import kvcompile
from kvcompile.debugging.output_code import PackedParts, marked

REWRITTEN = """
# inputs:
#    arg0  L['x']
#    arg1_packed  L['c'].keys  layers.0: packed key cache

class GraphModule(torch.nn.Module):
    def forward(self, arg0, arg1_packed):
"""


def rewritten(*lines: str) -> PackedParts:
    return PackedParts.of(REWRITTEN + "".join(f"        {line}\n" for line in lines))


def comments(code: str, packed: PackedParts) -> dict[str, str]:
    """The marked lines of ``code``, with their comments."""
    lines = marked(code, packed).splitlines()
    assert [line for line in lines if "# kvquant" not in line] == code.splitlines()
    marks = [(number, line.partition("# kvquant: ")[2]) for number, line in enumerate(lines) if "# kvquant: " in line]
    return {lines[number + 1].strip(): mark for number, mark in marks}


def test_calls_on_packed_caches_and_their_views_are_marked() -> None:
    packed = rewritten()
    assert packed.inputs == {"arg1_packed": "layers.0: packed key cache"}
    code = (
        "cpp = compile(r'''\n    kernel(arg1_packed)\n''')\n"
        "def call(args):\n"
        "    arg0, arg1_packed = args\n"
        "    assert_size_stride(arg1_packed, (1,), (1,))\n"
        "    buf0 = torch.ops.aten.view.dtype(arg1_packed, torch.float16)\n"
        "    buf1 = buf0\n"
        "    cpp_fused_0(arg0, buf2)\n"
        "    cpp_fused_1(arg0, buf1)\n"
        "    buf3 = torch.ops.kvcompile.attention.default(arg0)\n"
        "    torch.ops.kvcompile.store.default(arg1_packed)\n"
        "    buf4 = arg1_packed; del arg1_packed  # reuse\n"
        "    cpp_fused_2(buf4)\n"
    )
    assert comments(code, packed) == {
        "cpp_fused_1(arg0, buf1)": "layers.0: packed key cache",
        "buf3 = torch.ops.kvcompile.attention.default(arg0)": "kvcompile.attention.default",
        "torch.ops.kvcompile.store.default(arg1_packed)": (
            "==== kvcompile.store.default store; layers.0: packed key cache ===="
        ),
    }
    assert marked("no python (", packed) == "no python ("


def test_a_kernel_that_writes_a_packed_cache_has_a_heading_and_one_that_reads_it_has_none() -> None:
    code = (
        "cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'uint8_t*', 'const int64_t'], r'''...''')\n"
        "cpp_fused_1 = async_compile.cpp_pybinding(['const uint8_t*', 'float*'], r'''...''')\n"
        "def call(args):\n"
        "    cpp_fused_0(arg0, arg1_packed, 3)\n"
        "    cpp_fused_1(arg1_packed, buf1)\n"
    )
    assert comments(code, rewritten()) == {
        "cpp_fused_0(arg0, arg1_packed, 3)": "==== layers.0: key store ====",
        "cpp_fused_1(arg1_packed, buf1)": "layers.0: packed key cache",
    }


def test_the_code_of_a_region_has_the_roles_of_all_its_calls() -> None:
    code = (
        "def kvquant_attention_0(args):\n"
        "    kvquant_attention_0_arg0_1, kvquant_attention_0_arg1_1 = args\n"
        "    cpp_fused_0(kvquant_attention_0_arg1_1)\n"
        "def call(args):\n"
        "    kvquant_attention_0_args = [buf0, arg1_packed]\n"
        "    buf1 = kvquant_attention_0(kvquant_attention_0_args)\n"
        "    kvquant_attention_0_args = [buf1, arg2_packed]\n"
        "    buf2 = kvquant_attention_0(kvquant_attention_0_args)\n"
    )
    inputs = {"arg1_packed": "layers.0: packed key cache", "arg2_packed": "layers.1: packed key cache"}
    calls = {"kvquant_attention_0": ["layers.0: packed attention", "layers.1: packed attention"]}
    lines = marked(code, PackedParts(inputs, regions=calls)).splitlines()
    assert [line.strip().removeprefix("# kvquant: ") for line in lines if "# kvquant: " in line] == [
        "packed key cache",
        "layers.0: packed attention; layers.0: packed key cache",
        "layers.1: packed attention; layers.1: packed key cache",
    ]


def test_calls_of_a_region_that_may_run_in_any_order_are_not_told_apart() -> None:
    def region_call(name: str, argument: str, role: str) -> str:
        return f"{name} = torch.ops.higher_order.invoke_subgraph(region, 'kvquant_encoded_0', {argument})  # {role}"

    packed = rewritten(
        region_call("one", "arg0", "layers.0: key store"),
        region_call("two", "arg0", "layers.0: value store"),
        "both = torch.ops.aten.add.Tensor(one, two);  one = two = None",
        region_call("three", "both", "layers.1: key store"),
    )
    either = "layers.0: key store or layers.0: value store"
    assert packed.regions == {"kvquant_encoded_0": [either, either, "layers.1: key store"]}
    independent = rewritten(*(region_call(f"call_{n}", "arg0", f"layers.{n}: key store") for n in range(9)))
    assert set(independent.regions["kvquant_encoded_0"]) == {
        "layers.0: key store or layers.1: key store or one of 7 more"
    }


def test_a_region_of_unknown_calls_is_marked_with_its_name() -> None:
    code = "def call(args):\n    buf1 = kvquant_other_0([buf0])\n"
    assert comments(code, rewritten()) == {"buf1 = kvquant_other_0([buf0])": "kvquant_other_0"}


class Layer(torch.nn.Module):
    """Attention that returns its caches, as in a prompt: the graph makes them itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = x.sin(), x.cos()
        return x + F.scaled_dot_product_attention(x, keys, values, is_causal=True), keys, values


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        caches: list[Tensor] = []
        for layer in self.layers:
            x, keys, values = layer(x)
            caches += [values, keys]
        return x, caches


@pytest.fixture(scope="module")
def prompt_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("marks")
    options = {"policy": "int8_per_token_head", "fx_graph_cache": False}
    compiled = torch.compile(Layers(), backend="kvquant", options=options)
    # The code is read, its results are not: no kernel is compiled.
    without_kernels = mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *_: None)
    with torch.no_grad(), without_kernels, kvcompile.debug(folder, depyf=False) as report:
        compiled(torch.randn(1, 2, 16, 64))
    assert all(site.rewritten for site in report.sites), report
    return folder / "graph_1"


def test_regions_and_caches_that_the_graph_makes_are_marked_in_generated_code(prompt_dump: Path) -> None:
    lines = [line.strip() for line in (prompt_dump / "5_output_code.py").read_text().splitlines()]
    unmarked = [line for line, above in zip(lines[1:], lines, strict=False) if is_region_call(line) and not mark(above)]
    assert not unmarked
    marks = [mark(line) for line in lines if mark(line)]
    for layer in ("layers.0", "layers.1"):
        assert f"==== {layer}: key store ====" in marks
        assert f"==== {layer}: value store ====" in marks
        assert f"==== {layer}: key store; {layer}: value store ====" in marks, "the kernel that writes the bytes"
        attention = f"{layer}: packed attention; {layer}: packed key cache; {layer}: packed value cache"
        assert marks.count(attention) == 1
    assert "packed key cache" in marks, "a kernel within the region of attention"


def is_region_call(line: str) -> bool:
    return re.match(r"\w+ = kvquant_\w+\(", line) is not None


def mark(line: str) -> str:
    return line.partition("# kvquant: ")[2]


def test_each_store_and_attention_has_a_heading_in_the_rewritten_graph(prompt_dump: Path) -> None:
    headings = re.findall(r"^ +# ==== (.*) ====$", (prompt_dump / "4_rewritten.py").read_text(), re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert {heading.rsplit(": ", 1)[1] for heading in headings} >= {"key store", "value store", "packed attention"}
