"""Private names of fake tensors and of functionalization. Without one of them this file cannot be imported.

There is no fallback: the backend sees fake tensors only, and a packed cache must know which tracer calls its operators.
Only :func:`own_outputs` has a fallback.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode

try:
    from torch._functorch._aot_autograd.schemas import OutputType
except ImportError:
    OutputType = None  # type: ignore[assignment,misc]


def converted_tensors(fake_mode: FakeTensorMode) -> list[Tensor]:
    """The fake tensors that the mode has made of real tensors."""
    return list(fake_mode.fake_tensor_converter.meta_converter.tensor_memo.values())


@contextlib.contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """Errors of operators on fake tensors are only raised: PyTorch also logs each with a traceback."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def forget_real_tensors(gm: GraphModule) -> None:
    """Drop the weak references to the inputs of Dynamo's graph ``gm``, which would prevent adoption.

    Dynamo does the same after it has compiled a frame, but not in ``aot_compile``.
    """
    fakes = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    for fake_mode in {fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)}:
        describer = fake_mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def forget_in_fake_modes(tensors: Sequence[Tensor]) -> None:
    """Drop the weak references by which fake modes know ``tensors``, which would prevent adoption.

    A fake mode numbers the real tensors that it has seen. It lives as long as its fake tensors: those of
    ``torch.export`` stay in the nodes of the exported module. After its adoption a cache is another tensor, so what the
    mode knows of it would be wrong. Other tensors keep their numbers. The search looks at all objects of the process.
    """
    for numbering in [found for found in gc.get_objects() if type(found) is MetaTensorDescriber]:
        for tensor in tensors:
            numbering.lookup_tensor.pop(tensor, None)


def records_operators() -> bool:
    """Whether a tracer such as AOTAutograd records the running operators in a graph. Dynamo is not such a tracer."""
    return get_proxy_mode() is not None


def is_traced_here() -> bool:
    """Whether Dynamo or ``torch.export`` traces the running code.

    ``torch.compiler.is_compiling()`` is also true in all threads beside one that compiles.
    """
    return torch.compiler.is_dynamo_compiling() or records_operators()


def functional_mode() -> Any:
    """The mode in which AOTAutograd functionalizes code, if it is on; else None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)


def own_outputs(num_outputs: int) -> frozenset[int]:
    """The outputs of the compiled graph that share no memory with an input in the model, by position.

    AOTAutograd found them when it traced the model. Inductor may have changed the graph since then. Without this
    record the result is empty, and :mod:`kvcompile.passes.canonical.copy_returned_views` copies nothing.
    """
    context = TracingContext.try_get()
    record = getattr(context, "fw_metadata", None)
    infos = getattr(record, "output_info", ())
    first = len(getattr(record, "mutated_inp_runtime_indices", ()))  # these inputs are returned first
    if OutputType is None or first + len(infos) != num_outputs:
        return frozenset()
    return frozenset(first + place for place, info in enumerate(infos) if info.output_type is OutputType.non_alias)
