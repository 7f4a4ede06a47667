"""One step of a Hugging Face model with a cache that has tokens already, explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.models import first_line, text_config, uncompiled
from kvcompile.explaining import explain
from kvcompile.policy.policy import Policy
from kvcompile.report.report import Report

CacheKind = Literal["static", "growing"]

TOKENS_BEFORE = 4
"""Tokens that the cache has before the step, if it has room: a cache without any has no tensors yet."""


@torch.no_grad()
def explain_step(
    model: Any, policy: str | Path | Policy | None, *, kind: CacheKind, context: int, tokens: int
) -> Report:
    """What becomes of the attention of ``model`` in a step of ``tokens`` tokens.

    Args:
        model: a Hugging Face causal language model in inference mode.
        policy: what :meth:`Policy.load` takes.
        kind: of its cache: ``static``, with ``context`` slots, or ``growing``.
        context: how many tokens a static cache has room for.
        tokens: 1 for a decode step, more for a chunk of a prefill.

    Raises:
        EvaluationError: the step does not fit, or the model does not run with such a cache.
    """
    from transformers import DynamicCache, StaticCache

    if kind == "static" and tokens + TOKENS_BEFORE > context:
        raise EvaluationError(f"--tokens {tokens}, and {TOKENS_BEFORE} before them, are more than --context {context}")
    config = text_config(model)
    cache = StaticCache(config=config, max_cache_len=context) if kind == "static" else DynamicCache(config=config)
    ids = torch.zeros((1, TOKENS_BEFORE + tokens), dtype=torch.int64, device=model.device)
    try:
        uncompiled(model)(input_ids=ids[:, :TOKENS_BEFORE], past_key_values=cache, use_cache=True)
    except Exception as error:
        raise EvaluationError(
            f"{type(model).__name__} does not run with a {kind} cache: {first_line(error)}; explain it from Python, "
            "with kvcompile.explain and inputs of its own"
        ) from error
    step = ids[:, TOKENS_BEFORE:]
    return explain(model, input_ids=step, past_key_values=cache, use_cache=True, policy=policy)
