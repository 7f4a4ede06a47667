"""The operators launch the kernels that other threads have compiled."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton")

from packed_bytes import empty_packed

from kvcompile.kernels import launch, precompile
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import Launcher, compiling_only
from kvcompile.kernels.lang.triton import INTERPRETED
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.store import launch as store_launch

FORMAT = "int4_per_token_head"


class Kernel:
    """Stands in for a Triton kernel, and counts compilations and launches."""

    def __init__(self) -> None:
        self.compiled: list[tuple] = []
        self.launched: list[tuple] = []

    def warmup(self, *arguments, grid, **options):
        assert not any(isinstance(argument, torch.Tensor) for argument in arguments)
        assert all(argument.data_ptr() == 0 for argument in arguments if hasattr(argument, "dtype"))
        self.compiled.append(arguments)
        return self.version

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.compiled.append(arguments)
            self.version[grid](*arguments)
            return self.version

        return launch

    @property
    def version(self):
        return {(1, 1, 1): lambda *arguments: self.launched.append(arguments)}


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launcher, "INTERPRETED", True)  # there is no device to switch to
    return Kernel()


def test_a_launch_finds_the_version_that_was_compiled_before(kernel) -> None:
    launch_kernel = Launcher(kernel)
    arguments = (torch.zeros(64, dtype=torch.uint8),), ((1, 16),), (3,), ("constant",), {"num_warps": 4}
    with compiling_only():
        launch_kernel((1, 1, 1), *arguments)
        launch_kernel((1, 1, 1), *arguments)
    assert (len(kernel.compiled), kernel.launched) == (1, [])
    launch_kernel((1, 1, 1), *arguments)
    assert (len(kernel.compiled), len(kernel.launched)) == (1, 1)


def test_another_dtype_stride_constant_or_alignment_is_another_version(kernel) -> None:
    launch_kernel = Launcher(kernel)
    data = torch.zeros(64, dtype=torch.uint8)
    options = {"num_warps": 4}
    with compiling_only():
        launch_kernel((1, 1, 1), (data,), ((1, 16),), (3,), ("constant",), options)
    for tensor, strides, constant in (
        (data.view(torch.int8), (1, 16), "constant"),
        (data, (1, 17), "constant"),
        (data, (1, 16), "other"),
        (data[1:], (1, 16), "constant"),
    ):
        launch_kernel((1, 1, 1), (tensor,), (strides,), (3,), (constant,), options)
    assert len(kernel.compiled) == 5


def test_a_launch_waits_for_the_thread_that_compiles_its_kernel(kernel) -> None:
    launch_kernel, began, may_end = Launcher(kernel), threading.Event(), threading.Event()
    warmup = kernel.warmup

    def slow_warmup(*arguments, **options):
        began.set()
        assert may_end.wait(60)
        return warmup(*arguments, **options)

    kernel.warmup = slow_warmup
    arguments = (1, 1, 1), (torch.zeros(64),), ((1,),), (), ("constant",), {}

    def compile_only() -> None:
        with compiling_only():
            launch_kernel(*arguments)

    threads = [threading.Thread(target=compile_only), threading.Thread(target=launch_kernel, args=arguments)]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert (len(kernel.compiled), len(kernel.launched)) == (1, 1)


def decode_step(device: str) -> list[tuple[object, tuple, dict]]:
    """The operators of a decode step on a static cache, with their arguments."""
    layouts = [PackedLayout.parse(FORMAT, role, 64) for role in ("key", "value")]
    data = [empty_packed(layout, 100, 2, 2, torch.device(device)) for layout in layouts]
    query, new = torch.zeros(2, 4, 1, 64, device=device), torch.zeros(2, 2, 1, 64, device=device)
    mask = torch.ones(2, 1, 1, 100, dtype=torch.bool, device=device)
    positions = torch.tensor([7], device=device)
    ranges = torch.zeros(2, 1, 3, dtype=torch.int32, device=device)
    ops = torch.ops.kvcompile
    return [
        (ops.store_pair.default, (*data, new, new, positions, None, FORMAT, FORMAT), {}),
        (ops.visible_range.default, (mask, 1, 100), {}),
        (
            ops.attention.default,
            (query, *data, mask, None, 100, False, 0.125, 0.0, FORMAT, FORMAT, 64),
            {"ranges": ranges},
        ),
    ]


def test_nothing_is_compiled_for_a_cpu_for_symbolic_sizes_and_for_other_operators() -> None:
    for op, args, kwargs in decode_step("cpu"):
        assert precompile.precompile(op, args, kwargs) is None
    assert precompile.precompile(torch.ops.aten.add.Tensor, (torch.zeros(1), 1), {}) is None


@pytest.mark.gpu
def test_a_decode_step_launches_only_kernels_that_were_compiled_before() -> None:
    launchers = [
        launch.launch_attention,
        launch.launch_combine,
        launch.launch_visible_range,
        store_launch.launch_store_pair,
    ]
    for one in launchers:
        one.compiled.clear()
    precompile._start.cache_clear()
    step = decode_step("cuda")
    for op, args, kwargs in step:
        future = precompile.precompile(op, args, kwargs)
        assert future is not None
        future.result(120)
    versions = [set(one.compiled) for one in launchers]
    assert all(versions)
    for op, args, kwargs in step:
        op(*args, **kwargs)
    torch.cuda.synchronize()
    assert [set(one.compiled) for one in launchers] == versions


@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")
def test_triton_compiles_for_descriptions_of_tensors(monkeypatch) -> None:
    import triton
    from aot_compilation import NoDriver
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(triton.runtime.driver, "_active", NoDriver(90))
    monkeypatch.setattr(launcher, "capability_of", lambda device: 9)
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 108)
    monkeypatch.setattr(launcher, "INTERPRETED", True)
    monkeypatch.setattr(launch, "launch_visible_range", Launcher(launch.visible_range_kernel))
    with FakeTensorMode(), compiling_only():
        launch.visible_range(torch.ones(1, 1, 1, 100, dtype=torch.bool))
    (kernel,) = launch.launch_visible_range.compiled.values()
    assert "ptx" in kernel.asm
