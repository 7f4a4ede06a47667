"""A launch of a kernel becomes a call of the operator of packages, with the parameters that the kernel takes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from aot_compilation import NoDriver

from kvcompile import PackageError
from kvcompile.kernels import launch
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import Launch, Launcher, instead_of_launching
from kvcompile.kernels.lang.triton import INTERPRETED
from kvcompile.packaging.launches import LaunchArguments, arguments_of

needs_compiler = pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDriver(90))
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 132)
    monkeypatch.setattr(launcher, "INTERPRETED", True)  # there is no device to switch to
    monkeypatch.setattr(launch, "launch_visible_range", Launcher(launch.visible_range_kernel, writes=("out_ptr",)))


def recorded(mask: torch.Tensor) -> LaunchArguments:
    """The arguments of the only launch of ``visible_range``."""
    launches: list[Launch] = []
    with instead_of_launching(launches.append):
        launch.visible_range(mask)
    (one,) = launches
    arguments = arguments_of(one)
    ptx = one.compiled.asm["ptx"]
    entry = re.search(r"\.entry.*?\)", ptx, re.DOTALL)
    assert entry is not None
    assert len(arguments.parameters) + 2 == entry[0].count(".param")  # Triton adds two pointers to scratch memory
    return arguments


@needs_compiler
@pytest.mark.usefixtures("no_device")
def test_the_arguments_are_the_parameters_of_the_machine_code() -> None:
    mask = torch.ones(2, 1, 3, 300, dtype=torch.bool)
    arguments = recorded(mask)
    assert [tensor.shape for tensor in arguments.read] == [mask.shape]
    assert [tensor.shape for tensor in arguments.written] == [(2, 3, 3)]
    assert arguments.parameters[:2] == [0, 1]
    assert arguments.scalars == [900, 900, 300, 3, 300, 1]  # strides but the last, which is 1, and three numbers
    assert (arguments.name, arguments.grid, arguments.threads) == ("visible_range_kernel", [6, 1, 1], 128)


@needs_compiler
@pytest.mark.usefixtures("no_device")
def test_a_kernel_relies_only_on_the_alignment_that_the_trace_knows() -> None:
    mask = torch.ones(1, 1, 1, 304, dtype=torch.bool)
    assert recorded(mask).alignments == [16, 16]
    assert recorded(mask[..., 1:]).alignments == [1, 16]
    assert recorded(mask[..., 16:]).alignments == [16, 16]


def a_launch(tensors: tuple[torch.Tensor, ...], types: dict[str, Any], *others: Any, **metadata: Any) -> Launch:
    """A launch of a kernel that was not compiled."""
    kernel = SimpleNamespace(
        src=SimpleNamespace(fn=SimpleNamespace(arg_names=list(types)), signature=types),
        metadata=SimpleNamespace(name="kernel", num_warps=4, shared=0, **metadata),
        asm={"cubin": b"machine code"},
    )
    return Launch(kernel, (1, 1, 1), tensors, (True,) * len(tensors), others, ("out",))


def test_a_tensor_that_is_given_twice_is_one_tensor_and_is_written_if_one_parameter_is() -> None:
    x, out = torch.zeros(1), torch.zeros(1)
    types = {"x": "*fp32", "again": "*fp32", "unused": "*fp32", "out": "*fp32"}
    arguments = arguments_of(a_launch((x, x, out, out), types))
    assert (len(arguments.read), len(arguments.written)) == (1, 1)
    assert arguments.parameters == [0, 0, 1, 1]


def test_scalars_are_passed_as_their_bits_and_constants_are_not_passed() -> None:
    types = {
        "out": "*fp32",
        "strides": ("i64", "constexpr"),
        "n": "i32",
        "scale": "fp32",
        "exact": "fp64",
        "C": "constexpr",
    }
    arguments = arguments_of(a_launch((torch.zeros(1),), types, (2**40, 1), -3, 1.0, -2.0, "constant"))
    assert arguments.parameters == [0, -1, -1, -1, -1]
    assert arguments.scalars == [2**40, -3, 0x3F800000, -(2**62)]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"cluster_dims": (2, 1, 1)}, "clusters of programs"),
        ({"launch_cooperative_grid": True}, "a cooperative grid"),
        ({"global_scratch_size": 128}, "scratch memory"),
        ({"tensordesc_meta": [{}]}, "descriptors of tensors"),
    ],
)
def test_a_kernel_that_needs_more_than_the_operator_gives_is_an_error(metadata: dict, message: str) -> None:
    with pytest.raises(PackageError, match=f"kernel needs {message}, which a package cannot give it"):
        arguments_of(a_launch((torch.zeros(1),), {"out": "*fp32"}, **metadata))


def test_a_parameter_of_an_unknown_type_is_an_error() -> None:
    with pytest.raises(PackageError, match="of the type bf16"):
        arguments_of(a_launch((torch.zeros(1),), {"out": "*fp32", "x": "bf16"}, 1.0))
