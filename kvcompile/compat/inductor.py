"""Private names of Inductor and AOTAutograd. Without one of them this file cannot be imported.

There is no fallback: the backend needs them to compile a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch._inductor
import torch._inductor.compile_fx
from torch._functorch.compile_utils import fx_graph_cse as fx_graph_cse
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._inductor.lowering import lowerings
from torch._inductor.utils import BoxedBool as BoxedBool
from torch.export import ExportedProgram
from torch.fx import GraphModule

from kvcompile.compat.loop_tails import complete_loops
from kvcompile.compat.replaced import ReplacedInside


def compile_fx(gm: GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
    """The code of AOTAutograd and Inductor for a graph of Dynamo."""
    with complete_loops():
        return torch._inductor.compile_fx.compile_fx(gm, list(inputs), **how)


def can_call_subgraphs() -> bool:
    """Whether the code that Inductor generates now may call a subgraph: Python may, a C++ wrapper may not."""
    return not (torch._inductor.config.cpp_wrapper or getattr(torch._inductor.config, "fx_wrapper", False))


def _views_by_method() -> Callable[[], None]:
    """Generated Python code views a tensor in a dtype of another size by calling ``torch.Tensor.view``.

    Inductor calls an operator for such a view, which takes 6 us on a CPU, three times as long. The operator stays where
    the nodes of Inductor differ from the nodes known here.
    """
    view = torch.ops.aten.view.dtype
    lower = lowerings[view]

    def lower_view(x: Any, dtype: torch.dtype) -> Any:
        result = lower(x, dtype)
        buffer = getattr(getattr(result, "data", None), "data", None)
        for kernel in (buffer, *(getattr(buffer, "inputs", None) or ())):  # the buffer may be an output of the kernel
            if getattr(kernel, "op_overload", None) is view and hasattr(kernel, "python_kernel_name"):
                kernel.python_kernel_name = "torch.Tensor.view"
        return result

    def restore() -> None:
        lowerings[view] = lower

    lowerings[view] = lower_view
    return restore


views_by_method = ReplacedInside(_views_by_method)


def aoti_compile_and_package(exported: ExportedProgram, path: str, metadata: Mapping[str, str]) -> None:
    """Write AOTInductor's package of ``exported`` to ``path``, which ends in ``.pt2``, with strings as metadata."""
    configs = {"aot_inductor.metadata": dict(metadata)}
    with complete_loops():
        torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=configs)


def aoti_load_metadata(path: str) -> dict[str, str]:
    """The metadata of a package, without its code."""
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    return dict(loader.load_metadata_from_package(path, "model"))


def aoti_load_package(path: str) -> Callable[..., Any]:
    """The callable of a package."""
    return torch._inductor.aoti_load_package(path)
