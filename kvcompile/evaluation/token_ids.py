"""Token ids of a caller as the text of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.models import reads_bytes
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.text import Text

DECODE = 8
"""Tokens at the end of a window that are read one by one. Tokens of the prefill attend to packed keys and values too.
"""


def text_of(model: Any, inputs: Any, decode: int | None = None) -> Text:
    """Every row of token ids as a window, in which all tokens except the first are predicted.

    Args:
        model: a Hugging Face causal language model.
        inputs: int64 [tokens] or [rows, tokens], or the result of a tokenizer: a mapping with such ``input_ids``.
        decode: how many tokens are read one by one through the cache, after a prefill; by default DECODE, or half of a
            short row.

    Raises:
        EvaluationError: ``inputs`` are not token ids, rows are padded, or rows are too short.
    """
    ids = inputs
    if isinstance(inputs, Mapping):
        if "input_ids" not in inputs:
            raise EvaluationError(
                f"inputs: the mapping has no input_ids (it has {', '.join(map(str, inputs)) or 'nothing'})"
            )
        mask = inputs.get("attention_mask")
        if mask is not None and not torch.as_tensor(mask).all():
            raise EvaluationError("inputs: the rows are padded (attention_mask has zeros); give rows of one length")
        ids = inputs["input_ids"]
    ids = torch.as_tensor(ids)
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        raise EvaluationError(
            f"inputs: expected token ids, integers [tokens] or [rows, tokens], got {ids.dtype} {list(ids.shape)}"
        )
    windows: Tensor = ids.long().reshape(-1, ids.shape[-1]).cpu()
    fed = windows.shape[1] - 1
    decode = min(DECODE, fed // 2) if decode is None else decode
    if not 0 < decode < fed or not len(windows):
        raise EvaluationError(
            f"inputs: {len(windows)} rows of {windows.shape[1]} tokens are too few; give rows of 3 or more tokens, and "
            f"more than {max(decode, 1) + 1} to read {max(decode, 1)} of them one by one"
        )
    return Text("inputs", windows, Schedule(fed - decode, decode), reads_bytes(model))
