"""Packed caches as tensors: what every PyTorch operator does to them in eager and traced code.

Every class has a table of handlers, and the dispatch of :mod:`kvcompile.packed.subclass` looks operators up in it. The
modules imported here fill the tables. docs/packed_tensors.md lists what each operator does.

This room imports kernels only.
"""

import kvcompile.packed.copies
import kvcompile.packed.in_place
import kvcompile.packed.live_view
import kvcompile.packed.pool_ops
import kvcompile.packed.saved_names
import kvcompile.packed.stack_ops
import kvcompile.packed.views
import kvcompile.packed.writes  # noqa: F401
