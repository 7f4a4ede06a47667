"""``kvcompile doctor --try``: one attention with a cache, compiled and run on a device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcompile.cli.doctor_checks import MISSING, OK, Check
from kvcompile.report.report import collect_reports

TOLERANCE = 0.05
"""Largest absolute error of attention on 8-bit caches of random data with unit variance. The real error is a tenth."""


def try_device(device: str) -> Check:
    """Compile and run a decode step with a static ``int8_per_token_head`` cache, and compare it with eager code."""
    name = f"trial on {device}"
    try:
        with torch.no_grad(), collect_reports() as report:
            compiled = torch.compile(_decode_step, backend="kvquant", options={"policy": "int8_per_token_head"})
            error = (compiled(*_inputs(device)) - _decode_step(*_inputs(device))).abs().max().item()
    except Exception as failure:  # any failure is the result of the trial
        return Check(name, MISSING, f"{type(failure).__name__}", str(failure).strip().splitlines()[-1])
    if not report.totals.rewritten:
        return Check(name, MISSING, "nothing was packed", str(report))
    if not error < TOLERANCE:
        return Check(name, MISSING, f"wrong by {error:.3g}", "please report this with the output of `doctor --json`")
    return Check(name, OK, f"packed, largest error {error:.2g}")


def _inputs(device: str) -> list[Tensor]:
    """Query, new key, caches of keys and values, and the position of the new token."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 1, 64), (1, 2, 1, 64), (1, 2, 128, 64), (1, 2, 128, 64)]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [*tensors, torch.tensor([100], device=device)]


def _decode_step(query: Tensor, new: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Write one token into the caches and attend to all tokens up to it."""
    keys.index_copy_(2, position, new)
    values.index_copy_(2, position, new)
    mask = torch.arange(keys.shape[2], device=keys.device) <= position
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask[None, None, None], enable_gqa=True)
