"""Follow the values of a cache through a graph: copies and permutations, changes after a read, new rows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import ops
from torch.fx import Node

from kvcompile.compat.pytree import tree_leaves
from kvcompile.passes.graph.aten import SAME_OPS, WRITE_OPS, same_sizes, shape_of
from kvcompile.passes.graph.permutations import axes_after, permutes_dims
from kvcompile.passes.graph.pool_ops import POOL_VIEW
from kvcompile.passes.graph.states import states_of
from kvcompile.passes.prove.reorders import REORDERING

aten = ops.aten


def permutations_of(node: Node, axes: str) -> Iterator[tuple[Node, str]]:
    """``node``, which has the order ``axes``, and its permutations and copies, with their orders."""
    yield node, axes
    for user in node.users:
        if keeps_values(user):
            yield from permutations_of(user, axes_after(user, axes))


def keeps_values(node: Node) -> bool:
    """Whether ``node`` copies or permutes its operand, views a pool, or expands its operand to the same size."""
    is_same = node.target in SAME_OPS or node.target is POOL_VIEW or permutes_dims(node)
    return is_same or (node.target is aten.expand.default and same_sizes(shape_of(node), shape_of(node.args[0])))


def is_new_rows(node: Node) -> bool:
    """Whether a returned ``cat`` only assembles new rows, as rotary embeddings do, and extends no cache.

    One step may extend a cache more than once, so the first operand of every ``cat`` is followed.
    """
    if node.target is not aten.cat.default:
        return False
    base = node
    passing = (*SAME_OPS, *REORDERING, aten.slice.Tensor, aten.cat.default)
    while base.op == "call_function" and base.target in passing:
        base = base.args[0][0] if base.target is aten.cat.default else base.args[0]
    return base.op != "placeholder"


def is_overwritten(base: Node) -> bool:
    """Whether the graph copies a value into ``base``."""
    return any(user.target is aten.copy_.default and user.args[0] is base for user in base.users)


def is_written_before(repetition: Node) -> bool:
    """Whether ``repetition`` repeats a sequence that was written or selected before: only an input can be repeated."""
    node = repetition.args[0]
    while keeps_values(node):
        node = node.args[0]
    return node.target in WRITE_OPS


def change_after(root: Node, base: Node) -> Node | None:
    """The first write after ``root``, if a later state of it is written back to ``base`` or returned.

    If no later state is, the result is the value that the graph computes from ``root`` and copies into ``base``.
    """
    copied = [user.args[1] for user in base.users if user.target is aten.copy_.default and user.args[0] is base]
    returned = [node for node in root.graph.output_node().args[0] if isinstance(node, Node)]
    for states in map(states_of, copied + returned):
        if root in states:
            return next((state for state in states[states.index(root) + 1 :] if state.target in WRITE_OPS), None)
    return next((node for node in copied if node is not root and leads_to(root, node)), None)


def leads_to(node: Node, later: Node) -> bool:
    """Whether ``later`` depends on ``node``."""
    pending, seen = [node], {node}
    while pending:
        users = {user for user in pending.pop().users if user not in seen and user <= later}
        seen |= users
        pending += users
    return later in seen


def count_uses(node: Node, user: Node) -> int:
    """The number of times that ``node`` is an argument of ``user``."""
    return sum(leaf is node for leaf in tree_leaves((user.args, user.kwargs)))
