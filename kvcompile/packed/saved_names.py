"""Names of former versions in files of ``torch.save``, so that caches saved by these versions still load.

The safe loader (``weights_only=True``) takes a function for a name. The pickle loader imports the module of the name:
the present module stands in ``sys.modules`` under the former name. Both
work after an import of kvcompile.packed.
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
