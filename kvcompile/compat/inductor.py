"""Private names of Inductor and AOTAutograd. Without one of them this file cannot be imported.

There is no fallback: the backend needs them to compile a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch._inductor
from torch._functorch.compile_utils import fx_graph_cse as fx_graph_cse
from torch._inductor.compile_fx import compile_fx as compile_fx
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._inductor.utils import BoxedBool as BoxedBool
from torch.export import ExportedProgram


def can_call_subgraphs() -> bool:
    """Whether the code that Inductor generates now may call a subgraph: Python may, a C++ wrapper may not."""
    return not (torch._inductor.config.cpp_wrapper or getattr(torch._inductor.config, "fx_wrapper", False))


def aoti_compile_and_package(exported: ExportedProgram, path: str, metadata: Mapping[str, str]) -> None:
    """Write AOTInductor's package of ``exported`` to ``path``, which ends in ``.pt2``, with strings as metadata."""
    configs = {"aot_inductor.metadata": dict(metadata)}
    torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=configs)


def aoti_load_metadata(path: str) -> dict[str, str]:
    """The metadata of a package, without its code."""
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    return dict(loader.load_metadata_from_package(path, "model"))


def aoti_load_package(path: str) -> Callable[..., Any]:
    """The callable of a package."""
    return torch._inductor.aoti_load_package(path)
