"""The two ops that let passes treat a pool as a cache; :mod:`kvcompile.passes.pools.page` inserts them.

They have no kernels. After the rewrite, ``expand_pools`` replaces the remaining ops by PyTorch's own operators.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("kvcompile", "FRAGMENT")
_library.define("pool_view(Tensor pool, SymInt[] size, str axes) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define("gather_slots(Tensor cache, Tensor slots) -> Tensor", tags=torch.Tag.pt2_compliant_tag)

POOL_VIEW = torch.ops.kvcompile.pool_view.default
"""A view of a pool as a cache [1, num_slots, num_kv_heads, head_dim], or of such a cache as a pool.

``axes``: the order of the pool's dimensions (:mod:`kvcompile.passes.graph.permutations`).
"""

GATHER_SLOTS = torch.ops.kvcompile.gather_slots.default
"""Tokens [*N, num_kv_heads, head_dim] of a pool's cache, by ``slots``, integers [*N]."""
