"""The GPUs on which kernels were tested, or for which they were compiled, and the reason why others are refused."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

from kvcompile.kernels.lang.triton import INTERPRETED

Standing = Literal["tested", "compiled", "not compiled", "refused"]


class Gpu(NamedTuple):
    """Devices of one architecture.

    Attributes:
        architecture: the compute capability, such as ``8.6``, or AMD's name, such as ``gfx942``.
        devices: some of them.
        standing: ``tested`` if tests ran on one of them, ``compiled`` if kernels were only compiled for them.
    """

    architecture: str
    devices: str
    standing: Standing


GPUS = (
    Gpu("8.0", "A100, A30", "compiled"),
    Gpu("8.6", "RTX 3090, A10, A40", "compiled"),
    Gpu("8.9", "RTX 4090, L4, L40S", "compiled"),
    Gpu("9.0", "H100, H200", "tested"),
    Gpu("10.0", "B200", "compiled"),
    Gpu("12.0", "RTX 5090", "compiled"),
    Gpu("gfx942", "MI300X, MI325X", "compiled"),
)
"""``python tests/support/aot_devices.py`` compiles all kernels for these GPUs."""

LEAST_CAPABILITY = 8
"""Triton and asynchronous copies need this major compute capability."""


def architecture_of(device: torch.device) -> str:
    """The architecture of a GPU in this machine, as in :class:`Gpu`."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"{properties.major}.{properties.minor}"


def standing_of(device: torch.device) -> Standing:
    """The standing of a GPU in this machine; ``not compiled`` for NVIDIA's architectures that no row names."""
    if why_unsupported(device) is not None:
        return "refused"
    architecture = architecture_of(device)
    return next((gpu.standing for gpu in GPUS if gpu.architecture == architecture), "not compiled")


@functools.cache
def why_unsupported(device: torch.device) -> str | None:
    """Why kernels do not run on a device; None if they do, or if the device is not in this machine."""
    if device.type != "cuda" or INTERPRETED or not torch.cuda.is_available():
        return None
    name, architecture = torch.cuda.get_device_properties(device).name, architecture_of(device)
    if torch.version.hip is None:
        if int(architecture.split(".")[0]) >= LEAST_CAPABILITY:
            return None
        return f"{name} has compute capability {architecture}, and kernels need {LEAST_CAPABILITY}.0"
    compiled = [gpu.architecture for gpu in GPUS if gpu.architecture.startswith("gfx")]
    if architecture in compiled:
        return None
    return f"{name} is a {architecture}, and kernels were compiled for {', '.join(compiled)} only"
