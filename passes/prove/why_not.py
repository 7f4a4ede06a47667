"""Say why an operand of attention is not a cache that can be packed.

The graph may compute it from new rows alone, or from a cache in a way that cannot be packed. It may be a part of a
larger tensor, or something else may use it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import OpOverload
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.graph.aliases import lead_apart
from kvcompile.passes.graph.aten import SELECTIONS, VIEW_OPS, WRITE_OPS, shape_of
from kvcompile.passes.graph.names import cache_name, operation, tensor_name, user_name
from kvcompile.passes.graph.refused_inputs import noted_refusal
from kvcompile.passes.graph.states import first_state, states_of
from kvcompile.passes.marker import is_marker
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten

_ARRANGING = WRITE_OPS | VIEW_OPS | SELECTIONS | {aten.copy.default}
_CODES = frozenset((torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2))


def no_cache(root: Node, role: Role, later_states: Collection[Node]) -> Refusal:
    """The reason why ``root``, the origin of an operand of attention, is not a cache.

    ``later_states``: the written states of inputs that may be caches.
    """
    values = list(_reached(root, _values_of))
    codes = next((node for node in values if node.op == "placeholder" and node.meta["val"].dtype in _CODES), None)
    if codes is not None:
        return Refusal(Reason.already_quantized, role=role, source=cache_name(codes), dtype=codes.meta["val"].dtype)
    moved = next((node for node in (*values, *root.users) if _changes_device(node)), None)
    if moved is not None:
        devices = (node.meta["val"].device for node in (moved.args[0], moved))
        return Refusal(Reason.moved, role=role, source=" to ".join(map(str, devices)))
    if is_joined(root):
        return Refusal(Reason.joined, role=role, op=operation(root))
    if _is_copied_back(root):
        first = first_state(root)
        gathered = next((state for state in states_of(root) if state.target is aten.index.Tensor), root)
        op = operation(gathered if first.op == "placeholder" else first)
        return Refusal(Reason.unknown_write, role=role, op=op, detail="what it computes replaces all of the cache")
    # The search stops at attention of earlier layers: a value that is computed from its result is new.
    made_of = _reached(root, lambda node: [] if is_marker(node) else node.all_input_nodes)
    is_computed = any(node in later_states for node in made_of)
    return Refusal(Reason.computed_from_cache if is_computed else Reason.no_cache, role=role)


def is_joined(root: Node) -> bool:
    """Whether ``root`` concatenates a cache, which the graph writes or returns, with another input or cache."""
    if root.target is not aten.cat.default:
        return False
    kept = {node for node in root.graph.output_node().args[0] if isinstance(node, Node)}
    parts = [states for states in map(states_of, root.args[0]) if states[0].op == "placeholder" or kept & {*states}]
    has_cache = any(node.target in WRITE_OPS or node in kept for states in parts for node in states)
    return has_cache and len({states[0] for states in parts}) > 1


def _is_copied_back(root: Node) -> bool:
    """Whether an input is overwritten with ``root``, with a later state of it, or with a tensor that contains it."""
    states = states_of(root)
    made_here = states[0].op == "call_function"
    copied = (states_of(copy.args[1]) for copy in root.graph.find_nodes(op="call_function", target=aten.copy_.default))
    return any(
        root in others or (made_here and others[0] is states[0] and not lead_apart(states, others)) for others in copied
    )


def _reached(root: Node, operands_of: Callable[[Node], Iterable[Node]]) -> Iterable[Node]:
    """``root`` and the nodes that ``operands_of`` leads to from it."""
    pending, seen = [root], {root}
    while pending:
        node = pending.pop()
        yield node
        operands = [operand for operand in operands_of(node) if operand not in seen]
        seen.update(operands)
        pending.extend(operands)


def _values_of(node: Node) -> list[Node]:
    """The operands of ``node`` that give one number for each number of the result, in any order.

    Broadcast operands of sums and products (scales and masks) and the operands of projections do not.
    """
    operands = [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), torch.Tensor)]
    if len(operands) < 2 or node.target in _ARRANGING:
        return operands
    if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return []
    size = node.meta["val"].numel()
    return [operand for operand in operands if statically_known_true(operand.meta["val"].numel() == size)]


def _changes_device(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or len(node.all_input_nodes) != 1 or value.dim() != 4:
        return False
    before = node.all_input_nodes[0].meta.get("val")
    return isinstance(before, torch.Tensor) and before.device != value.device


def check_whole(root: Node, role: Role) -> None:
    """Raise Refusal if attention reads one layer or role of a larger tensor, or tokens that an index gathers."""
    first = first_state(root)
    if root.target not in (aten.select.int, operator.getitem, aten.index.Tensor) or first.op != "placeholder":
        return
    if root.target is not aten.index.Tensor:
        reason, detail = Reason.part_of_tensor, "which is not made of caches [batch, heads, tokens, head_dim]"
    elif len(shape_of(root)) != 4 or shape_of(root) != shape_of(root.args[0]):
        reason, detail = Reason.gathered, "which is not a tensor of slots or blocks of its own"
    else:
        return
    refusal = noted_refusal(first)
    if refusal is None or refusal.reason is not reason:
        refusal = Refusal(reason, detail=detail)
    raise refusal.with_particulars(role=role, source=tensor_name(first))


def check_not_returned_whole(root: Node, role: Role, returned: Collection[Node]) -> None:
    """Raise Refusal if attention reads a part of new rows that the graph returns whole, such as some channels."""
    whole = next((state for state in states_of(root)[:-1] if state in returned), None)
    if whole is not None and root.target in SELECTIONS:
        detail = "which is returned and is not made of caches [batch, heads, tokens, head_dim]"
        raise Refusal(Reason.part_of_tensor, role=role, source=f"the result of {operation(whole)}", detail=detail)


def used_elsewhere(role: Role, state: Node, user: Node) -> Refusal:
    """The refusal of a cache whose value ``state`` is also used by ``user``."""
    return Refusal(Reason.used_elsewhere, role=role, source=cache_name(state), user=user_name(user))
