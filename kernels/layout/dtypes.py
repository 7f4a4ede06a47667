"""The names of dtypes in messages, files and names of formats."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """The name without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
