"""Aliases for module names that former versions wrote with ``torch.save``, so that their caches still load.

The safe loader (``weights_only=True``) maps each former name to a registered function. The pickle loader imports the
module of the former name, so ``sys.modules`` lists the present module under that name. Both loaders work after
kvcompile.packed has been imported.
"""

from __future__ import annotations

import sys

import torch

from kvcompile.packed import pool, stack, tensor

for _module, _former, _rebuild in (
    (tensor, "kvcompile.packed_tensor", tensor.rebuild_packed_tensor),
    (pool, "kvcompile.packed_pool", pool.rebuild_packed_pool),
    (stack, "kvcompile.packed_stack", stack.rebuild_packed_stack),
):
    torch.serialization.add_safe_globals([(_rebuild, f"{_former}.{_rebuild.__name__}")])
    sys.modules.setdefault(_former, _module)
