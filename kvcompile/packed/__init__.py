"""Packed caches are tensor subclasses; this package defines every PyTorch operator on them, in eager and traced code.

Every class has a table of handlers. The dispatch in :mod:`kvcompile.packed.subclass` looks up operators in this table.
The modules imported here fill the tables. docs/packed_tensors.md lists the behaviour of each operator.

This room imports kernels and compat only.
"""

import kvcompile.packed.attention
import kvcompile.packed.copies
import kvcompile.packed.flex
import kvcompile.packed.in_place
import kvcompile.packed.live_view
import kvcompile.packed.pool_ops
import kvcompile.packed.range_ops
import kvcompile.packed.repeated_heads
import kvcompile.packed.saved_names
import kvcompile.packed.shard
import kvcompile.packed.stack_ops
import kvcompile.packed.views
import kvcompile.packed.without_data
import kvcompile.packed.writes  # noqa: F401
