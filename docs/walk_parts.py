"""The generated parts of the page on how the passes work: a decode step, its graph at every stage, its output code.

The step is compiled up to the code that Inductor generates, without a C++ compiler and without a GPU. Every public
function returns Markdown for one part; :mod:`make_pages` puts the parts into the page.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from kvcompile.compilation import rewriter
from kvcompile.debugging import stages
from kvcompile.debugging.stages import Stage
from kvcompile.passes import pipeline
from kvcompile.passes.packing import Packing
from kvcompile.passes.pipeline import Pass
from kvcompile.policy.policy import Policy
from kvcompile.report.data import GraphReport
from kvcompile.report.report import Report

POLICY = "int8_per_token_head"
COLUMNS = 110
SCALAR = {"cpp.simdlen": 1, "cpp.threads": 1, "fx_graph_cache": False}
"""Settings that give the same code on every CPU: no vector instructions, one thread."""


class CachedAttention(nn.Module):
    """Attention of 4 query heads on 2 KV heads, over a static cache of 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16))
        self.register_buffer("values", torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        visible = torch.arange(128, device=q.device) <= position
        return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=visible[None], enable_gqa=True)


class Decoder(nn.Module):
    """One layer without its projections, which the passes do not change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CachedAttention()])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        return self.layers[0](q, k, v, position)


class _CodeSeenError(Exception):
    """Ends the compilation before the C++ compiler runs, because the page shows only the generated code."""


class Walk:
    """A decode step at every stage; has the methods of :class:`kvcompile.debugging.stages.Watcher`.

    Attributes:
        texts: the graph at each stage.
        on_cuda: the rewritten graph for tensors on a GPU.
        report: the report on its attention.
        output_code: the code that Inductor generates for the CPU.
    """

    def __init__(self) -> None:
        self.texts: dict[Stage, str] = {}
        self.on_cuda = ""
        self.report = Report()
        self.output_code = ""

    def begin(self, policy: Policy, compile_id: str) -> int:
        return 1

    def stage(self, number: int, stage: Stage, text: str) -> None:
        self.texts[stage] = text

    def reported(self, number: int, graph: GraphReport) -> None:
        self.report.graphs.append(graph)

    def passed(self, number: int, step: int, name: str, text: str) -> None:
        pass

    def run(self, packing: Packing) -> Iterator[Pass]:
        """Run the pipeline, first on a copy of the graph with tensors on a GPU, then on the graph itself."""
        on_cuda = copy.deepcopy(packing.gm)
        for node in on_cuda.graph.nodes:
            node.meta["val"] = _on_cuda(node.meta.get("val"))
        tried = dataclasses.replace(packing, gm=on_cuda, example_inputs=_on_cuda(packing.example_inputs))
        for _ in pipeline.run(tried):
            pass
        self.on_cuda = stages.readable(on_cuda, {index: known.source for index, known in enumerate(tried.inputs)})
        return pipeline.run(packing)

    def keep_code(self, lowering: GraphLowering) -> Any:
        self.output_code = lowering.codegen()[0].value
        raise _CodeSeenError


def _on_cuda(values: Any) -> Any:
    """Copies of fake tensors on a fake GPU; this needs no GPU."""

    def move(tensor: FakeTensor) -> Tensor:
        with tensor.fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    return tree_map_only(FakeTensor, move, values)


@functools.cache
def walk() -> Walk:
    """Compile one decode step up to the code that Inductor generates."""
    seen = Walk()
    torch._dynamo.reset()
    q, k, v = (torch.zeros(1, heads, 1, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    model = torch.compile(Decoder().eval(), backend="kvquant", options={"policy": POLICY, **SCALAR})
    with (
        stages.watched_by(seen),
        mock.patch.object(rewriter, "run", seen.run),
        mock.patch.object(GraphLowering, "compile_to_module", lambda lowering: seen.keep_code(lowering)),
        torch.no_grad(),
    ):
        try:
            model(q, k, v, torch.tensor([5]))
        except Exception as error:
            if "_CodeSeenError" not in repr(error):
                raise
    torch._dynamo.reset()
    return seen


def torch_version() -> str:
    """The version of PyTorch that made the graphs and the code, without its build."""
    return torch.__version__.partition("+")[0]


def made_with() -> str:
    """The version that the graphs and the code depend on."""
    return f"The graphs and the code come from PyTorch {torch_version()}."


def model() -> str:
    """The source of the model."""
    return _block("python", "\n\n\n".join(inspect.getsource(thing).rstrip() for thing in (CachedAttention, Decoder)))


def dynamo_graph() -> str:
    return _block("python", _graph(walk().texts[Stage.dynamo]))


def marker() -> str:
    """The line that marks the attention."""
    return _block("python", _lines_with("kvcompile.sdpa", walk().texts[Stage.marked]))


def aten_graph() -> str:
    return _block("python", _graph(walk().texts[Stage.aten]))


def rewritten_inputs() -> str:
    """The inputs of the rewritten graph."""
    lines = walk().texts[Stage.rewritten].split("# inputs:\n")[1].partition("\n\n")[0].splitlines()
    return _block("text", "\n".join(line.removeprefix("#").strip() for line in lines))


def rewritten_on_cuda() -> str:
    return _block("python", _graph(walk().on_cuda))


def rewritten_on_cpu() -> str:
    """The operations on floats and bytes in the region that encodes the keys, and then in the store."""
    text = walk().texts[Stage.rewritten]
    region = text.partition("class kvquant_encoded_0(")[2].partition("class ")[0]
    store = [line for line in _statements(text) if line.endswith("# layers.0: key store")]
    lines = [line for line in (*_statements(region), *store) if re.match(r'\w+: "(f32|u8)\[\d', line)]
    return _block("python", _wrapped(lines))


def output_calls() -> str:
    """The calls of the generated wrapper, in order: regions, operators and kernels."""
    body = walk().output_code.partition("def call(self, args):")[2].partition("return ")[0]
    return _block("python", _wrapped(re.findall(r"^ +((?:\w+ = (?:torch\.ops|kvquant_)|cpp_).*)$", body, re.MULTILINE)))


def output_store() -> str:
    """The generated loop that writes the bytes of a key into the cache."""
    return _block("cpp", _loop_nest(lambda body: "TORCH_CHECK" in body and "4352L" in body))


def output_scores() -> str:
    """The generated loop that multiplies packed keys with the query."""
    return _block("cpp", _loop_nest(lambda body: "tmp_acc1 = tmp_acc1 + " in body and "128.0" in body))


def report() -> str:
    """The report of the step."""
    return _block("text", str(walk().report))


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _statements(text: str) -> Iterator[str]:
    """The statements of a graph, each on one line; statements that only rename an input or free memory are skipped."""
    body = text.partition("def forward(")[2]
    for line in body.splitlines()[1:]:
        line = re.sub(r";  (?:\w+ = )+None", "", line.strip())
        if line and not line.startswith("#") and not re.fullmatch(r"(l_\w+_) = \w+", line):
            yield line


def _graph(text: str) -> str:
    return _wrapped(_statements(text))


def _lines_with(words: str, text: str) -> str:
    return _wrapped(line for line in _statements(text) if words in line)


def _wrapped(lines: Iterable[str]) -> str:
    """Statements wrapped to COLUMNS, with a comment before the first statement of each role for a site."""
    wrapper = textwrap.TextWrapper(COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    result, last = [], ""
    for line in lines:
        statement, _, comment = line.partition("  # ")
        if comment != last and not statement.startswith("return"):
            result.append(f"# {comment or 'the rest of the model'}")
        result.append(wrapper.fill(statement))
        last = comment
    return "\n".join(result)


def _loop_nest(is_wanted: Callable[[str], bool]) -> str:
    """The first loop nest of the generated C++ for which ``is_wanted`` is true."""
    nests = re.findall(r"^    \{\n.*?^    \}\n", walk().output_code, re.MULTILINE | re.DOTALL)
    return textwrap.dedent(next(nest for nest in nests if is_wanted(nest))).rstrip()
