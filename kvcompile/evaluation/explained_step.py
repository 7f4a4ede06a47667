"""A report on one step of a Hugging Face model whose cache already holds tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from kvcompile.compat.transformers import with_cache
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.models import first_line, text_config, uncompiled
from kvcompile.explaining import explain, verify
from kvcompile.policy.policy import Policy
from kvcompile.report.report import Report

CacheKind = Literal["static", "growing"]

TOKENS_BEFORE = 4
"""Tokens in the cache before the step. An empty cache has no tensors yet."""


@torch.no_grad()
def explain_step(
    model: Any,
    policy: str | Path | Policy | None,
    *,
    kind: CacheKind,
    context: int,
    tokens: int,
    verified: bool = False,
) -> Report:
    """The report on the attention of ``model`` in a step of ``tokens`` tokens.

    Args:
        model: a Hugging Face causal language model in inference mode.
        policy: anything that :meth:`Policy.load` takes.
        kind: the kind of the cache, ``static`` or ``growing``.
        context: the capacity of a static cache in tokens.
        tokens: 1 for a decode step, more for a chunk of a prefill.
        verified: whether rewritten graphs are compared with their originals, as in :func:`kvcompile.verify`.

    Raises:
        EvaluationError: the step does not fit, or the model does not run with such a cache.
    """
    from transformers import DynamicCache, StaticCache

    if kind == "static" and tokens + TOKENS_BEFORE > context:
        raise EvaluationError(
            f"--tokens {tokens}, and {TOKENS_BEFORE} tokens before them, exceed --context {context}; raise --context"
        )
    config = text_config(model)
    ids = torch.zeros((1, TOKENS_BEFORE + tokens), dtype=torch.int64, device=model.device)
    try:
        cache = StaticCache(config=config, max_cache_len=context) if kind == "static" else DynamicCache(config=config)
        uncompiled(model)(input_ids=ids[:, :TOKENS_BEFORE], use_cache=True, **with_cache(model, cache))
    except Exception as error:
        raise EvaluationError(
            f"{type(model).__name__} does not run with a {kind} cache: {first_line(error)}; call kvcompile.explain "
            "from Python with suitable inputs"
        ) from error
    step = ids[:, TOKENS_BEFORE:]
    examine = verify if verified else explain
    return examine(model, input_ids=step, use_cache=True, policy=policy, **with_cache(model, cache))
