"""The operators ``kvcompile::*`` that graphs are rewritten to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_library = torch.library.Library("kvcompile", "DEF")
_library.define(
    "sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, "
    "bool enable_gqa, str module) -> Tensor"
)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    module: str,
) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _sdpa_fake(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


_library.impl("sdpa", _sdpa, "CompositeExplicitAutograd")
torch.library.register_fake("kvcompile::sdpa", _sdpa_fake, lib=_library)
