"""Token ids of a caller as the text of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import one_line, shown
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.models import reads_bytes
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.text import Text, check_ids

DECODE = 8
"""The number of tokens at the end of a window that are read one by one. The prefill also attends to packed data."""


def text_of(model: Any, inputs: Any, decode: int | None = None) -> Text:
    """A text with every row of token ids as a window. All tokens except the first are predicted.

    Args:
        model: a Hugging Face causal language model.
        inputs: int64 [tokens] or [rows, tokens], or the result of a tokenizer: a mapping with such ``input_ids``.
        decode: the number of tokens that are read one by one through the cache, after a prefill; by default DECODE, or
            half of a short row.

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
        if mask is not None and not _tensor(mask, "attention_mask").all():
            raise EvaluationError("inputs: the rows are padded (attention_mask has zeros); give rows of one length")
        ids = inputs["input_ids"]
    ids = _tensor(ids, "token ids")
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        raise EvaluationError(
            f"inputs: expected token ids, integers [tokens] or [rows, tokens], got {ids.dtype} {list(ids.shape)}"
        )
    windows: Tensor = ids.long().reshape(-1, ids.shape[-1]).cpu()
    check_ids(windows, model, "inputs")
    fed = windows.shape[1] - 1
    if decode is not None and (not isinstance(decode, int) or isinstance(decode, bool)):
        raise EvaluationError(f"decode: expected a number of tokens, got {shown(decode)}")
    decode = min(DECODE, fed // 2) if decode is None else decode
    if not 0 < decode < fed or not len(windows):
        raise EvaluationError(
            f"inputs: {len(windows)} rows of {windows.shape[1]} tokens are too few; give rows of 3 or more tokens, and "
            f"more than {max(decode, 1) + 1} to read {max(decode, 1)} of them one by one"
        )
    return Text("inputs", windows, Schedule(fed - decode, decode), reads_bytes(model))


def _tensor(values: Any, what: str) -> Tensor:
    """``values`` as a tensor with data; EvaluationError if they are not numbers, or rows have several lengths."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise EvaluationError(f"inputs: {what} must be integers in rows of one length: {one_line(error)}") from None
    if tensor.is_meta:
        raise EvaluationError(f"inputs: {what} are on the device meta, which has no data; give them on a CPU or GPU")
    return tensor
