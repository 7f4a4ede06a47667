"""Name the reason why an operand of attention is not a cache that can be packed.

Matchers raise the reasons that they find. The functions here read nodes that no matcher reads: the computation behind
an operand that is neither an input nor a write of one, and the copies over inputs. The passes that split stacks and
page pools note their refusals at the input, and :func:`check_whole` raises such a note.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import OpOverload
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.graph.aliases import lead_apart
from kvcompile.passes.graph.aten import LIST_OPS, SELECTIONS, VIEW_OPS, WRITE_OPS, arguments, shape_of
from kvcompile.passes.graph.computed_from import states_behind
from kvcompile.passes.graph.names import cache_name, operation, tensor_name, user_name
from kvcompile.passes.graph.refused_inputs import noted_refusal
from kvcompile.passes.graph.states import first_state, states_of
from kvcompile.passes.prove.reorders import REORDERING
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten

_ARRANGING = WRITE_OPS | VIEW_OPS | SELECTIONS | {aten.copy.default}
_CHANGING = WRITE_OPS.difference(REORDERING)
_CODES = frozenset((torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2))


def no_cache(root: Node, role: Role, later_states: Collection[Node], base: Node | None = None) -> Refusal:
    """The reason why ``root``, the origin of an operand of attention, is not a cache.

    No matcher has read the nodes that this function reads. The function follows the values of ``root`` back to
    quantized codes, to a move between devices and to caches, and it looks for copies of ``root`` into an input.

    Args:
        root: the origin of the operand.
        role: the role of the operand.
        later_states: the written states of inputs that may be caches.
        base: the value before all recognised writes of ``root``, if there are any.
    """
    values = list(_reached(root))
    codes = next((node for node in values if node.op == "placeholder" and node.meta["val"].dtype in _CODES), None)
    if codes is not None:
        return Refusal(Reason.already_quantized, role=role, source=cache_name(codes), dtype=codes.meta["val"].dtype)
    moved = next((node for node in (*values, *root.users) if _changes_device(node)), None)
    if moved is not None:
        devices = (node.meta["val"].device for node in (moved.args[0], moved))
        return Refusal(Reason.moved, role=role, source=" to ".join(map(str, devices)))
    if is_joined(root):
        return Refusal(Reason.joined, role=role, op=operation(root))
    overwritten = _overwritten_with(root)
    if overwritten is not None:
        new = root.args[1] if root.target is aten.copy.default else root
        if first_state(new) is new and not states_behind(new, lambda node: node is overwritten):
            what = tensor_name(new) if new.op == "placeholder" else f"the result of {operation(new)}"
            return Refusal(Reason.overwritten, role=role, source=cache_name(overwritten), new=what)
        first = first_state(root)
        op = "copy_" if root.op == "placeholder" else operation((base or root) if first.op == "placeholder" else first)
        detail = "its result replaces the whole cache; do this in eager code, between calls"
        return Refusal(Reason.unknown_write, role=role, op=op, detail=detail)
    written_later = _read_before_write(root, values)
    if written_later is not None:
        return Refusal(Reason.read_before_write, role=role, source=cache_name(written_later))
    is_computed = bool(states_behind(root, later_states.__contains__))
    return Refusal(Reason.computed_from_cache if is_computed else Reason.no_cache, role=role)


def _read_before_write(root: Node, values: Sequence[Node]) -> Node | None:
    """The input whose value before its write is in ``root``, and that is not written with ``root``; None without it.

    RecurrentGemma joins such an input with the new tokens, and attention reads both.

    Args:
        root: the origin of an operand of attention.
        values: the nodes that give one number for each of its numbers, ``root`` included.
    """
    inputs = {node for node in values if node.op == "placeholder"}
    copies = root.graph.find_nodes(op="call_function", target=aten.copy_.default)
    kept = [*root.graph.output_node().all_input_nodes, *(copy.args[1] for copy in copies)]
    for first, *later in map(states_of, kept) if inputs else ():
        if first in inputs and not _CHANGING.isdisjoint(state.target for state in later):
            changed = {root, *(node for node in values if node.target in _CHANGING and first_state(node) is first)}
            if not states_behind(later[-1], changed.__contains__):
                return first
    return None


def is_joined(root: Node) -> bool:
    """Whether ``root`` joins a cache that the graph writes or returns with another one, but not their channels."""
    if root.target is not aten.cat.default or arguments(root)[1] == len(shape_of(root)) - 1:
        return False
    kept = {*root.graph.output_node().all_input_nodes}
    parts = [states for states in map(states_of, root.args[0]) if states[0].op == "placeholder" or kept & {*states}]
    has_cache = any(node.target in WRITE_OPS or node in kept for states in parts for node in states)
    return has_cache and len({states[0] for states in parts}) > 1


def is_copied_back(root: Node) -> bool:
    """Whether an input is overwritten with ``root``, with a later state of it, or with a tensor that contains it."""
    return _overwritten_with(root) is not None


def _overwritten_with(root: Node) -> Node | None:
    """The input that is overwritten, as in :func:`is_copied_back`; None if there is none."""
    states = states_of(root)
    made_here = states[0].op == "call_function"
    for copy in root.graph.find_nodes(op="call_function", target=aten.copy_.default):
        others = states_of(copy.args[1])
        if root in others or (made_here and others[0] is states[0] and not lead_apart(states, others)):
            return copy.args[0]
    return None


def _reached(root: Node) -> Iterator[Node]:
    """``root`` and the nodes that give one number for each of its numbers."""
    pending, seen = [root], {root}
    while pending:
        node = pending.pop()
        yield node
        operands = [operand for operand in _values_of(node) if operand not in seen]
        seen.update(operands)
        pending.extend(operands)


def _values_of(node: Node) -> list[Node]:
    """The operands of ``node`` that give one number for each number of the result, in any order.

    Broadcast operands of sums and products (scales and masks) and the operands of projections do not.
    """
    operands = [
        operand
        for operand in node.all_input_nodes
        if isinstance(operand.meta.get("val"), torch.Tensor) or operand.target in LIST_OPS
    ]
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
    """Raise Refusal if attention reads one index of a larger input, or what an index gathers from an input.

    The reason comes from the pass that could not split the stack or page the pool. If no pass has noted a reason, the
    input has the shape of neither.
    """
    first = first_state(root)
    if root.target not in (aten.select.int, operator.getitem, aten.index.Tensor) or first.op != "placeholder":
        return
    if root.target is not aten.index.Tensor:
        reason, detail = Reason.part_of_tensor, "which is not made of caches [batch, heads, tokens, head_dim]"
    elif len(shape_of(root)) != 4 or shape_of(root) != shape_of(root.args[0]):
        if root.args[1][0] is None:  # an index of slots or blocks comes first
            raise Refusal(Reason.unknown_read, role=role, op=operation(root))
        reason, detail = Reason.gathered, "which is not a separate tensor of slots or blocks"
    else:
        return
    refusal = noted_refusal(first, reason) or Refusal(reason, detail=detail)
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
