"""Let one kernel count the tokens of all layers, and compute where each layer stores them.

Each layer of a static cache counts its tokens in a tensor of its own. A step stores ``n`` tokens at the positions
``counter + arange(n)`` and then adds ``n`` to the counter. On a GPU this is one kernel for each layer, which costs its
launch. Inductor generates one kernel for all results of a ``_foreach`` operator. The kernel also computes what depends
on one result, and on nothing else that another kernel makes, if that has as many elements.

After this pass one ``_foreach`` operator computes the new values of all counters, and nothing else reads the counters:
the old value of a counter is its new value minus ``n``. Integers wrap around, so the difference is exact. The positions
of one token thus depend on one result. Other kernels read counters that have already been increased.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.inline import behind_placeholders, insert_call

aten = torch.ops.aten


def merge_counters(graph: Graph) -> None:
    """Let one operator increase all counters that are on one device, have one dtype and increase by one number."""
    groups = defaultdict(list)
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        if _counts(copy):
            counter, total = copy.args
            groups[counter.meta["val"].device, counter.meta["val"].dtype, total.args[1]].append(copy)
    for (_, _, step), copies in groups.items():
        if len(copies) > 1:
            _merge(graph, copies, step)


def _counts(copy: Node) -> bool:
    """Whether ``copy`` increases an input of one integer by a constant, and the graph does not return the input."""
    counter, total = copy.args
    if not (counter.op == "placeholder" and isinstance(total, Node) and total.target is aten.add.Tensor):
        return False
    value = counter.meta["val"]
    return (
        total.args[0] is counter
        and type(total.args[1]) is int
        and not total.kwargs
        and value.dtype in (torch.int64, torch.int32)
        and statically_known_true(value.numel() == 1)
        and not copy.users
        and all(user is copy or user.target not in (aten.copy_.default, "output") for user in counter.users)
    )


def _merge(graph: Graph, copies: Sequence[Node], step: int) -> None:
    counters = [copy.args[0] for copy in copies]
    with graph.inserting_before(behind_placeholders(graph.find_nodes(op="placeholder")[-1])):
        totals = insert_call(graph, aten._foreach_add.Scalar, counters, step)
        after = [insert_call(graph, operator.getitem, totals, index) for index in range(len(counters))]
        before = [insert_call(graph, aten.sub.Tensor, total, step) for total in after]
    for copy, counter, old, new in zip(copies, counters, before, after, strict=True):
        total = copy.args[1]
        new.meta = {**total.meta, "val": new.meta["val"]}
        total.replace_all_uses_with(new)
        graph.erase_node(total)
        for reader in [user for user in counter.users if user not in (copy, totals)]:
            reader.replace_input_with(counter, old)
        if not old.users:
            graph.erase_node(old)
