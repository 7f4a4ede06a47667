"""Compile kernels for GPUs that do not exist: launchers meet a driver without a device, and kernels do not run."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.tools import disasm

from kvcompile.kernels import change_of_basis, launch
from kvcompile.kernels.attention import launch_prefill, new_tokens
from kvcompile.kernels.deepseek_v4 import kernels as deepseek_v4
from kvcompile.kernels.gather import kernel as gather_kernel
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import Multiprocessor
from kvcompile.kernels.latent import launch as launch_latent
from kvcompile.kernels.store import launch as launch_store

CPU = torch.device("cpu")
INT8 = "int8_per_token_head"
RESIDUAL = "[recent=1,sinks=1,bfloat16]"


class Gpu(NamedTuple):
    """A GPU for which kernels are compiled.

    Attributes:
        target: Triton's description of the GPU.
        capability: the major compute capability, or 0 on AMD.
        multiprocessor: its shared memory and registers.
        converts_e4m3: whether it has instructions that convert fp8.
    """

    target: GPUTarget
    capability: int
    multiprocessor: Multiprocessor
    converts_e4m3: bool


def _nvidia(capability: int, of_program: int, of_multiprocessor: int) -> Gpu:
    multiprocessor = Multiprocessor(of_program << 10, of_multiprocessor << 10)
    return Gpu(GPUTarget("cuda", capability, 32), capability // 10, multiprocessor, capability >= 89)


def _amd(name: str, shared_kilobytes: int) -> Gpu:
    multiprocessor = Multiprocessor(shared_kilobytes << 10, shared_kilobytes << 10, 1 << 17, 512, 64)
    return Gpu(GPUTarget("hip", name, 64), 0, multiprocessor, False)


GPUS: dict[int | str, Gpu] = {
    80: _nvidia(80, 163, 164),
    86: _nvidia(86, 99, 100),
    89: _nvidia(89, 99, 100),
    90: _nvidia(90, 227, 228),
    100: _nvidia(100, 227, 228),
    120: _nvidia(120, 99, 100),
    "gfx942": _amd("gfx942", 64),
}
"""GPUs by compute capability, or by AMD's name of the architecture. Kilobytes of shared memory of a program and of a
multiprocessor (CUDA C++ Programming Guide, technical specifications; AMD CDNA 3 white paper)."""


class CompileOnly:
    """Stands in for a kernel: compiles it for every new launch, and does not run it."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled = []

    def __getitem__(self, grid):
        def compile_kernel(*arguments, **options):
            compiled = self.kernel.warmup(*arguments, grid=grid, **options)
            check_columns_of_threads(compiled.asm["ttgir"])
            self.compiled.append(compiled)

        return compile_kernel


def check_columns_of_threads(ttgir):
    """Check that rows of first operands have columns for the four threads that share a row, ``kWidth`` for each.

    If there are fewer columns, Triton computes wrong products (joined tiles of 8 columns, Triton 3.6).
    """
    operand = r"tt\.dot .* : tensor<\S*x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = #mma\d*, kWidth = (\d+)"
    for columns, width in re.findall(operand, ttgir):
        assert 4 * int(width) <= int(columns), f"kWidth {width} of {columns} columns"


class CountOnly:
    """Stands in for a kernel whose versions are only counted: neither compiles nor runs it."""

    def __init__(self, kernel):
        self.compiled = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.compiled.append(arguments) or self


class NoDriver:
    """Answers what Triton asks a driver before it compiles, for a GPU that does not exist."""

    def __init__(self, gpu):
        self.target = GPUS[gpu].target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0


def stand_ins(stand_in, gpu, monkeypatch):
    """Replace all kernels by ``stand_in(kernel)``, as if the machine had ``gpu``; returns each ``compiled`` by name."""
    described = GPUS[gpu]
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDriver(gpu))
    # Triton's pattern of a line takes addresses of four digits only, and so ends the code after 64 KiB.
    monkeypatch.setattr(disasm, "FLINE_RE", re.compile(disasm.FLINE_RE.pattern.replace(r"\w{4}", r"\w{4,}", 1)))
    monkeypatch.setattr(launcher, "capability_of", lambda device: described.capability)
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 108)
    monkeypatch.setattr(launcher, "multiprocessor_of", lambda device: described.multiprocessor)
    monkeypatch.setattr(launcher, "converts_e4m3", lambda device: described.converts_e4m3)
    monkeypatch.setattr(launcher, "INTERPRETED", True)  # there is no device to switch to
    kernels = {}
    for module, names in (
        (launch, "attention attention_with_factors combine visible_range"),
        (
            launch_store,
            "store store_pair store_few store_few_pair place_tokens copy_tags store_blocks last_token store_header",
        ),
        (launch_prefill, "dequantize prefill_attention"),
        (new_tokens, "new_tokens"),
        (change_of_basis, "change_of_basis"),
        (launch_latent, "latent_attention hopper_latent_attention store_latents"),
        (gather_kernel, "gather"),
        (deepseek_v4, "insert gather"),
    ):
        for name in names.split():
            kernel = stand_in(getattr(module, f"{name}_kernel"))
            monkeypatch.setattr(module, f"launch_{name}", launcher.Launcher(kernel))
            kernels[name if name not in kernels else f"{name}_of_pages"] = kernel.compiled
    return kernels


def count(instructions, name):
    return sum(bool(re.search(rf"\b{name}\b", instruction)) for instruction in instructions)


def uses(instructions, name):
    return count(instructions, name) > 0
