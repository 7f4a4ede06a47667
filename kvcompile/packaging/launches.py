"""Trace the operators of a step down to launches of kernels, which a package makes without Python.

An operator on a GPU is Python that launches Triton kernels. In a package every launch is a call of the operator
``kvcompile_package::launch``, which has the machine code of the kernel among its arguments. ``launch.cpp`` beside this
file implements it with the CUDA driver.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import cpp_extension

from kvcompile.compat.triton_names import machine_code
from kvcompile.errors import PackageError, one_line
from kvcompile.kernels.lang.launcher import Launch, instead_of_launching
from kvcompile.kernels.lang.triton import triton
from kvcompile.kernels.ops import IMPLEMENTATIONS
from kvcompile.passes.calling import Rewritten
from kvcompile.passes.rewrite.make_replayable import can_replay, store_in_place

SOURCE = Path(__file__).with_name("launch.cpp")


def inline_operators(gm: GraphModule, rewritten: Rewritten) -> None:
    """Replace operators of kvcompile by the functions that run them, so that a trace contains their launches.

    Stores become operations that change caches in place. Operators without such a function stay in the graph.

    Raises:
        PackageError: the step does more with its caches than to store tokens and to attend to them.
    """
    if not can_replay(gm, rewritten):
        raise PackageError(
            "the step moves tokens within a cache, or uses some sequences of it, which a package for a GPU cannot "
            "hold; compile it with torch.compile"
        )
    placeholders = gm.graph.find_nodes(op="placeholder")
    store_in_place(gm, {placeholders[action.index] for action in rewritten.inputs})
    for node in gm.graph.nodes:
        node.target = IMPLEMENTATIONS.get(node.target, node.target) if node.op == "call_function" else node.target
    gm.recompile()


def operators_in_python(gm: GraphModule) -> list[str]:
    """The operators of kvcompile in a graph, which a program without Python could not call."""
    used = [one for node in gm.graph.nodes for one in (node.target, *node.args)]
    return [str(one) for one in used if getattr(one, "namespace", "") == "kvcompile"]


@contextlib.contextmanager
def tracing_launches() -> Iterator[None]:
    """A ``with`` block in which launches become calls of ``kvcompile_package::launch``, which a trace can hold."""
    load_operator()
    with instead_of_launching(lambda launch: torch.ops.kvcompile_package.launch(*arguments_of(launch))):
        yield


def pass_masks_as_they_are(gm: GraphModule) -> None:
    """Remove the views of masks as bytes, which launches take: Inductor cannot view a bool tensor as another dtype.

    A launch takes an address and strides. A bool tensor and its view as bytes have the same address and strides.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype):
        if node.args[0].meta["val"].dtype == torch.bool:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


@functools.cache
def load_operator() -> None:
    """Compile ``launch.cpp`` with the C++ compiler of this machine, unless an earlier process did, and load it.

    Raises:
        PackageError: it could not be compiled.
    """
    try:
        cpp_extension.load(
            name="kvcompile_package",
            sources=[str(SOURCE)],
            extra_include_paths=[cuda_headers()],
            extra_cflags=["-O2", "-std=c++20"],
            is_python_module=False,
        )
    except (OSError, RuntimeError, ImportError) as error:
        raise PackageError(
            f"{SOURCE.name}, which launches the kernels of a package, cannot be compiled: {one_line(error)}; it needs "
            "a C++ compiler and ninja (pip install ninja)"
        ) from error
    torch.library.register_fake("kvcompile_package::launch", lambda *arguments: None)


def cuda_headers() -> str:
    """The folder of ``cuda.h``, which ``launch.cpp`` includes: Triton ships this file."""
    assert triton is not None
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "include")


class LaunchArguments(NamedTuple):
    """The arguments of ``kvcompile_package::launch``; ``launch.cpp`` describes them."""

    read: list[Tensor]
    written: list[Tensor]
    parameters: list[int]
    alignments: list[int]
    scalars: list[int]
    name: str
    code: str
    digest: str
    grid: list[int]
    threads: int
    shared_memory: int
    early: bool


def arguments_of(launch: Launch) -> LaunchArguments:
    """The arguments that repeat ``launch``.

    Raises:
        PackageError: the kernel needs more than ``launch.cpp`` gives it.
    """
    try:
        code = machine_code(launch.compiled)
    except AttributeError as error:
        raise PackageError(
            f"this release of Triton does not tell what a compiled kernel needs ({one_line(error)}); package the step "
            "for a CPU, or with a release of Triton that was tested (python -m kvcompile doctor)"
        ) from error
    if code.needs is not None:
        raise PackageError(f"the kernel {code.name} needs {code.needs}, which a package cannot give it")
    written = _distinct(
        tensor for name, tensor in zip(code.types, launch.tensors, strict=False) if name in launch.writes
    )
    read = _distinct(tensor for tensor in launch.tensors if id(tensor) not in written)
    places = {one: place for place, one in enumerate([*read, *written])}
    alignments = {id(tensor): 16 if flag else 1 for tensor, flag in zip(launch.tensors, launch.aligned, strict=True)}
    parameters, scalars = [], []
    for type, value in _flat(code.types.values(), (*launch.tensors, *launch.others)):
        if isinstance(value, Tensor):
            parameters.append(places[id(value)])
        elif type != "constexpr":
            parameters.append(-1)
            scalars.append(_bits(type, value))
    return LaunchArguments(
        read=list(read.values()),
        written=list(written.values()),
        parameters=parameters,
        alignments=[alignments[one] for one in places],
        scalars=scalars,
        name=code.name,
        code=base64.b64encode(code.cubin).decode(),
        digest=hashlib.sha256(code.cubin).hexdigest(),
        grid=list(launch.grid),
        threads=32 * code.num_warps,
        shared_memory=code.shared_memory,
        early=code.early,
    )


def _distinct(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Tensors by their identity."""
    return {id(tensor): tensor for tensor in tensors}


def _flat(types: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The parameters of the machine code with their types. Tuples are one parameter for each element."""
    for type, value in zip(types, values, strict=True):
        if isinstance(type, (tuple, list)):
            yield from _flat(type, value)
        else:
            yield type, value


def _bits(type: str, value: float) -> int:
    """The bits of a scalar of a Triton type, such as ``i32`` or ``fp32``, as a signed 64-bit integer.

    Raises:
        PackageError: the type is unknown.
    """
    if type in ("i1", "i8", "i16", "i32", "i64"):
        return int(value)
    if type == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    if type == "fp64":
        return struct.unpack("<q", struct.pack("<d", value))[0]  # type: ignore[no-any-return]
    raise PackageError(f"a kernel has a parameter of the type {type}, which a package cannot give it")
