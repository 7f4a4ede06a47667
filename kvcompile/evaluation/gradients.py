"""The gradients of a model's loss with respect to the keys and values of its attention layers.

The loss is the negative log-likelihood of tokens that the model draws itself, so that second moments of the gradients
are the Fisher information. Let ``e`` be the error of a key or value, and ``g`` its gradient. The sum of
``(e . g)**2 / 2`` over the vectors of a text then estimates the divergence of the predictions due to these errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import AttentionTap
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.site import Site


def calls_with_gradients(
    tap: AttentionTap, window: Tensor, generator: torch.Generator, first_position: int | None = None
) -> dict[str, AttentionCall]:
    """The attentions of a model on a window, by module, after a backward pass.

    Args:
        tap: the :class:`AttentionTap` of a model, inside :func:`differentiable_inputs`.
        window: int64 [n], the tokens that the model reads.
        generator: draws the tokens of the loss, on the CPU.
        first_position: the position of the first token; None leaves positions to the model.
    """
    calls: dict[str, AttentionCall] = {}

    def keep(site: Site, call: AttentionCall) -> None:
        if call.can_be_packed and call.key.requires_grad and call.value.requires_grad:
            call.key.retain_grad()
            call.value.retain_grad()
            calls[site.module] = call

    logits = tap(window, keep, first_position=first_position, gradients=True).float()
    drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
    F.cross_entropy(logits, drawn.to(logits.device), reduction="sum").backward()
    return calls


def gradient(call: AttentionCall, role: Role) -> Tensor | None:
    """The gradient of the keys or values, [batch, num_kv_heads, n, channels]; None if no gradient reached them.

    It is the sum over all query heads that read a KV head.
    """
    found = call.operand(role).grad
    return None if found is None else found.unflatten(1, (-1, call.repeats)).sum(2)


@contextmanager
def differentiable_inputs(model: Any) -> Iterator[None]:
    """Let gradients reach all activations inside the ``with`` block, but no weights other than the embedding's."""
    embedding = model.get_input_embeddings()
    own = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for parameter in own:
            parameter.requires_grad_(False)
        embedding.weight.requires_grad_(True)
        yield
    finally:
        for parameter, requires_grad in own.items():
            parameter.requires_grad_(requires_grad)
        embedding.weight.grad = None
