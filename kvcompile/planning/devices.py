"""The peak memory bandwidth of some GPUs, as published by NVIDIA.

Kernels reach less: on an H200 the fastest measured read has 4.35 TB/s of 4.8 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.errors import did_you_mean
from kvcompile.planning.errors import PlanError
from kvcompile.planning.units import RATE_FORMS, parse_rate


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second, and the source of the figure."""

    bytes_per_second: int
    source: str


def _nvidia(gigabytes_per_second: int, document: str) -> Bandwidth:
    return Bandwidth(gigabytes_per_second * 10**9, f"peak, NVIDIA {document}")


DEVICES: dict[str, Bandwidth] = {
    "a100-40gb": _nvidia(1555, "A100 40GB data sheet"),
    "a100-80gb-pcie": _nvidia(1935, "A100 80GB PCIe data sheet"),
    "a100-80gb-sxm": _nvidia(2039, "A100 80GB SXM data sheet"),
    "b200": _nvidia(8000, "DGX B200 data sheet: 64 TB/s for 8 GPUs"),
    "h100-nvl": _nvidia(3900, "H100 NVL data sheet"),
    "h100-pcie": _nvidia(2000, "H100 PCIe data sheet"),
    "h100-sxm": _nvidia(3350, "H100 SXM data sheet"),
    "h200": _nvidia(4800, "H200 data sheet"),
    "l4": _nvidia(300, "L4 data sheet"),
    "l40s": _nvidia(864, "L40S data sheet"),
    "rtx-4090": _nvidia(1008, "Ada GPU architecture white paper"),
    "rtx-5090": _nvidia(1792, "RTX Blackwell GPU architecture white paper"),
}


def read_bandwidth(text: str) -> Bandwidth:
    """The bandwidth that ``text`` names: a rate, e.g. ``4.35TB/s``, or a key of :data:`DEVICES`.

    Raises:
        PlanError: ``text`` is neither.
    """
    device = DEVICES.get(text.casefold())
    if device is not None:
        return device
    if text[:1].isdigit():
        return Bandwidth(parse_rate(text, "--bandwidth"), "as given")
    hint = did_you_mean(text.casefold(), DEVICES)
    known = ", ".join(DEVICES)
    raise PlanError(f"--bandwidth: {text!r} is not a known device{hint} (write one of {known}, or {RATE_FORMS})")
