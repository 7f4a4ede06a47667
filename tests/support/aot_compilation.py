"""Compile kernels for GPUs that do not exist: launchers meet a driver without a device, and kernels do not run."""

from __future__ import annotations

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.tools import disasm

from kvcompile.kernels import launch
from kvcompile.kernels.attention import launch_prefill
from kvcompile.kernels.gather import kernel as gather_kernel
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.latent import launch as launch_latent
from kvcompile.kernels.store import launch as launch_store

CPU = torch.device("cpu")
INT8 = "int8_per_token_head"
RESIDUAL = "[recent=1,sinks=1,bfloat16]"

SHARED_MEMORY = {
    capability: kilobytes << 10
    for capability, kilobytes in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()
}
"""The most bytes of shared memory of a program, by compute capability (CUDA C++ Programming Guide, technical
specifications)."""


class CompileOnly:
    """Stands in for a kernel: compiles it for every new launch, and does not run it."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled = []

    def __getitem__(self, grid):
        def compile_kernel(*arguments, **options):
            self.compiled.append(self.kernel.warmup(*arguments, grid=grid, **options))

        return compile_kernel


class CountOnly:
    """Stands in for a kernel whose versions are only counted: neither compiles nor runs it."""

    def __init__(self, kernel):
        self.compiled = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.compiled.append(arguments) or self


class NoDriver:
    """Answers what Triton asks a driver before it compiles, for a GPU that does not exist."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return f"sm_{self.capability}"

    def get_current_stream(self, device):
        return 0


def stand_ins(stand_in, capability, monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDriver(capability))
    # Triton's pattern of a line takes addresses of four digits only, and so ends the code after 64 KiB.
    monkeypatch.setattr(disasm, "FLINE_RE", re.compile(disasm.FLINE_RE.pattern.replace(r"\w{4}", r"\w{4,}", 1)))
    monkeypatch.setattr(launcher, "capability_of", lambda device: capability // 10)
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 108)
    monkeypatch.setattr(launcher, "shared_memory_of", lambda device: SHARED_MEMORY[capability])
    monkeypatch.setattr(launcher, "INTERPRETED", True)  # there is no device to switch to
    kernels = {}
    for module, names in (
        (launch, "attention combine visible_range"),
        (
            launch_store,
            "store store_pair store_few store_few_pair place_tokens copy_tags store_blocks last_token store_header",
        ),
        (launch_prefill, "dequantize prefill_attention"),
        (launch_latent, "latent_attention hopper_latent_attention store_latents"),
        (gather_kernel, "gather"),
    ):
        for name in names.split():
            kernel = stand_in(getattr(module, f"{name}_kernel"))
            monkeypatch.setattr(module, f"launch_{name}", launcher.Launcher(kernel))
            kernels[name] = kernel.compiled
    return kernels


def count(instructions, name):
    return sum(bool(re.search(rf"\b{name}\b", instruction)) for instruction in instructions)


def uses(instructions, name):
    return count(instructions, name) > 0
