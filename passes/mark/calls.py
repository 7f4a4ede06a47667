"""Read the nodes of Dynamo's graph: operations in any spelling, constants, and the tensors that a node changes.

``torch.mul(x, y)``, ``x * y``, ``x.mul(y)``, ``x *= y``, ``x.mul_(y)`` and ``torch.ops.aten.mul(x, y)`` are six nodes.
:func:`read_call` gives them one name, and names their arguments. Dynamo may choose another target in another release:
since PyTorch 2.15 it writes the attribute ``x.mT`` as ``torch.ops.aten.mT(x)``.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import HigherOrderOperator, OpOverload, OpOverloadPacket
from kvcompile.compat.pytree import tree_leaves
from kvcompile.compat.tensors import is_traceable_wrapper_subclass, schema_of, storage_id
from kvcompile.passes.graph.aten import same_sizes
from kvcompile.passes.graph.names import input_name, with_line

_OPERATORS = (OpOverload, OpOverloadPacket)
_NAMESPACES = (operator, torch, F, torch.special, torch.Tensor)

_IN_PLACE_OPERATORS = {
    getattr(operator, f"i{name}"): name
    for name in (
        "add",
        "and",
        "floordiv",
        "lshift",
        "matmul",
        "mod",
        "mul",
        "or",
        "pow",
        "rshift",
        "sub",
        "truediv",
        "xor",
    )
}

_SYNONYMS = {
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "subtract": "sub",
    "concat": "cat",
    "concatenate": "cat",
    "clip": "clamp",
    "clamp_min": "clamp",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "_to_copy": "to",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}

_PARAMETERS = {
    "add": "input other alpha",
    "sub": "input other alpha",
    "mul": "input other",
    "div": "input other rounding_mode",
    "matmul": "input other",
    "bmm": "input mat2",
    "baddbmm": "input batch1 batch2 beta alpha",
    "softmax": "input dim dtype",  # the operator ``_softmax`` has ``half_to_float`` in the place of ``dtype``
    "_safe_softmax": "input dim dtype",
    "log_softmax": "input dim dtype",
    "logsumexp": "input dim keepdim",
    "neg": "input",
    "exp": "input",
    "log": "input",
    "tanh": "input",
    "sum": "input dim keepdim dtype",
    "amax": "input dim keepdim",
    "max": "input dim keepdim",
    "maximum": "input other",
    "clamp": "input min max",
    "masked_fill": "input mask value",
    "nan_to_num": "input nan posinf neginf",
    "where": "condition input other",
    "eq": "input other",
    "ne": "input other",
    "any": "input dim keepdim",
    "all": "input dim keepdim",
    "cat": "tensors dim",
    "getitem": "input index",
    "setitem": "input index value",
    "dropout": "input p training inplace",
    "transpose": "input dim0 dim1",
    "permute": "input dims",
    "tensor": "data",
    "scalar_tensor": "data",
    "full": "size fill_value",
    "full_like": "input fill_value",
    "new_full": "input size fill_value",
    "new_tensor": "input data",
}

_OTHER_ORDER = {  # parameters of callables that differ from others of the same name
    F.softmax: "input dim _stacklevel dtype",
    F.log_softmax: "input dim _stacklevel dtype",
    torch.dropout: "input p training",
    "where": "input condition other",  # the method
}

SOFTMAXES = frozenset(("softmax", "_safe_softmax"))
"""Operations that normalise scores. A safe softmax gives zeros, and not NaN, for a row in which all scores are -inf."""

_SYNONYMS_OF_PARAMETERS = {"self": "input", "train": "training"}  # in the schemas of operators

CASTS = frozenset(("to", "type", "type_as", "float", "half", "bfloat16", "double"))
SAME_VALUE = frozenset(("contiguous", "clone", "detach", "alias"))
VIEWS = frozenset(
    ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "expand", "expand_as")
)
PERMUTATIONS = frozenset(("transpose", "permute", "mT"))
_PARTS = frozenset(
    ("getitem", "select", "narrow", "chunk", "split", "unbind", "unfold", "diagonal", "movedim", "t", "T")
)
_SHAPE_ONLY = frozenset(("size", "dim", "ndimension", "numel", "stride", "is_contiguous", "element_size", "get_device"))
_SHAPE_ATTRIBUTES = frozenset(("shape", "dtype", "device", "ndim", "is_cuda"))
_LIKE = frozenset(("view_as", "reshape_as", "expand_as", "type_as", "to", "type"))


@dataclass(frozen=True)
class Call:
    """One operation of Dynamo's graph.

    Attributes:
        node: the node that calls it.
        name: the name of the operation, the same for all its spellings.
        args: the arguments that were passed, by parameter name. Further positional arguments are in ``extra``.
    """

    node: Node
    name: str
    args: dict[str, Any]

    def get(self, parameter: str, default: Any = None) -> Any:
        return self.args.get(parameter, default)


def read_call(node: Node) -> Call | None:
    """The operation that ``node`` calls; None if it calls no function or method of PyTorch."""
    name = _name(node)
    if name is None or node.kwargs.get("out") is not None:
        return None
    key = node.target if node.op == "call_function" else name
    names = _OTHER_ORDER.get(key) if node.op == "call_function" or name == "where" else None
    parameters = (names or _PARAMETERS.get(name, "input")).split()
    args = dict(zip(parameters, node.args, strict=False))
    args["extra"] = node.args[len(parameters) :]
    args |= {_SYNONYMS_OF_PARAMETERS.get(parameter, parameter): value for parameter, value in node.kwargs.items()}
    return Call(node, name, args)


def called(node: Node) -> str:
    """The name of ``node`` in messages: an input, or the function that it calls, with the line of the model."""
    if node.op == "placeholder":
        return input_name(node)
    call = read_call(node)
    return with_line(call.name if call is not None else str(getattr(node.target, "__name__", node.target)), node)


def _name(node: Node) -> str | None:
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        if node.target in _IN_PLACE_OPERATORS:
            return _SYNONYMS.get(_IN_PLACE_OPERATORS[node.target], _IN_PLACE_OPERATORS[node.target])
        if node.target is getattr and len(node.args) == 2:
            return str(node.args[1])
        name = _name_of_function(node.target)
        if not name:
            return None
    else:
        return None
    if name.endswith("__"):
        name = name.strip("_")  # ``Tensor.__eq__``
    elif name.endswith("_"):
        name = name[:-1]
    return _SYNONYMS.get(name, name)


def _name_of_function(target: Any) -> str:
    """The name of a function of PyTorch or Python, or of an ATen operator that is named after one; "" for others."""
    if isinstance(target, _OPERATORS):
        namespace, name = str(target).split(".")[:2]
        is_known = namespace == "aten" and any(hasattr(known, name) for known in _NAMESPACES)
    else:
        name = getattr(target, "__name__", "")
        is_known = any(getattr(namespace, name, None) is target for namespace in _NAMESPACES)
    return name if is_known else ""


def value_of(node: Any) -> Any:
    """The fake value of a node (None if it has none), or ``node`` itself if it is not a node."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def constant_of(value: Any, is_changed: Callable[[Node], bool]) -> float | None:
    """The number of ``value`` if it is known while compiling: a Python number, or a tensor filled with one number.

    Args:
        value: an argument of a node.
        is_changed: whether anything in the graph changes the tensor of a node in place.
    """
    while isinstance(value, Node):
        call = read_call(value)
        if call is None or is_changed(value):
            return None
        if call.name in CASTS or call.name in SAME_VALUE:
            value = call.get("input")
        elif call.name in ("full", "full_like", "new_full"):
            value = call.get("fill_value")
        elif call.name in ("zeros", "zeros_like", "new_zeros"):
            value = 0.0
        elif call.name in ("ones", "ones_like", "new_ones"):
            value = 1.0
        elif call.name in ("tensor", "scalar_tensor", "new_tensor"):
            value = call.get("data", call.get("s"))
        else:
            return None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def are_zeros_and_ones(node: Node, is_changed: Callable[[Node], bool]) -> bool:
    """Whether each number of a tensor is 0 or 1: it is made of bools, or of a triangle of a constant 0 or 1.

    ``is_changed``: whether anything in the graph changes the tensor of a node in place.
    """
    while isinstance(value_of(node), Tensor) and value_of(node).dtype is not torch.bool:
        call = read_call(node)
        if call is None or is_changed(node):
            return False
        if call.name in ("tril", "triu"):
            return constant_of(call.get("input"), is_changed) in (0, 1)
        source = call.get("input")
        is_moved = call.name in (*VIEWS, *PERMUTATIONS, *SAME_VALUE, *_PARTS)
        if not isinstance(value_of(source), Tensor) or not (call.name in CASTS or is_moved):
            return False
        if is_moved and value_of(source).dtype is not value_of(node).dtype:
            return False
        node = source
    return isinstance(value_of(node), Tensor)


def bound_of(value: Any, is_changed: Callable[[Node], bool]) -> float:
    """An upper bound of the absolute values in ``value``; ``inf`` if no bound is known.

    Args:
        value: an argument of a node.
        is_changed: whether anything in the graph changes the tensor of a node in place.
    """
    tensor, sources = value_of(value), _sources_of_numbers(value)
    if sources and not is_changed(value):
        number: float | None = max(bound_of(source, is_changed) for source in sources)
    else:
        number = constant_of(value, is_changed)
    if number is None or math.isnan(number):
        return math.inf
    if isinstance(tensor, Tensor) and tensor.is_floating_point():
        number = torch.tensor(number, dtype=tensor.dtype).item()
    return abs(number)


def _sources_of_numbers(value: Any) -> list[Any]:
    """The arguments that hold the numbers of an operation's result; the operation may only select and round them."""
    call = read_call(value) if isinstance(value, Node) else None
    if call is None:
        return []
    if call.name == "where":
        return [call.get("input"), call.get("other")]
    if call.name == "masked_fill":
        return [call.get("input"), call.get("value")]
    source, result = value_of(call.get("input")), value_of(value)
    if not isinstance(source, Tensor) or not isinstance(result, Tensor):
        return []
    takes_part = call.name in (*VIEWS, *PERMUTATIONS, *SAME_VALUE, *_PARTS) and source.dtype is result.dtype
    return [call.get("input")] if takes_part or call.name in CASTS else []


def asks_for_shape(user: Node, node: Node) -> bool:
    """Whether ``user`` looks only at the shape, dtype or device of ``node``, not at its values."""
    call = read_call(user)
    if call is None:
        return False
    if call.name in _SHAPE_ONLY or (user.target is getattr and call.name in _SHAPE_ATTRIBUTES):
        return True
    if call.name.endswith("_like") or call.name.startswith("new_"):
        return call.get("input") is node and user.all_input_nodes.count(node) == 1
    return call.name in _LIKE and call.get("input") is not node


def reads_values(user: Node, node: Node) -> bool:
    """Whether the graph needs values of ``node`` for ``user``, which then is neither dead nor asks for a shape."""
    return not asks_for_shape(user, node) and not _is_dead(user)


def _is_dead(node: Node) -> bool:
    """Whether a function of PyTorch changes no tensor, and nothing needs its result."""
    return read_call(node) is not None and not mutated_by(node) and all(map(_is_dead, node.users))


def mutated_by(node: Node) -> list[Node]:
    """The nodes whose tensors ``node`` changes in place. If it calls an unknown function, these are all its inputs."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    out = node.kwargs.get("out")
    if out is not None:
        return _nodes(out)
    if node.op == "call_function" and isinstance(node.target, _OPERATORS):
        return _written_by_operator(node)
    if node.op == "call_module" or (node.op == "call_function" and not _is_of_torch(node.target)):
        return list(node.all_input_nodes)
    name = node.target if node.op == "call_method" else node.target.__name__
    # Functions of ``operator`` that are named after keywords also end in "_": ``and_``, ``or_``.
    in_place = name.endswith("_") and not name.endswith("__") and getattr(operator, name, None) is not node.target
    in_place = in_place or node.target in _IN_PLACE_OPERATORS or name in ("setitem", "__setitem__")
    if in_place or _asks_to_work_in_place(node):
        return _nodes(node.args[0] if node.args else node.kwargs.get("input"))
    return []


def _written_by_operator(node: Node) -> list[Node]:
    """The arguments that an operator changes. A packet chooses an overload when it runs, so all its overloads count."""
    op = node.target
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    written = [
        node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        for overload in overloads
        for place, argument in enumerate(schema_of(overload).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
    ]
    return list(dict.fromkeys(_nodes(written)))


def _asks_to_work_in_place(node: Node) -> bool:
    place = _place_of_inplace(node.target) if node.op == "call_function" else None
    given = node.kwargs.get("inplace", False)
    return bool(node.args[place] if place is not None and place < len(node.args) else given)


@functools.cache
def _place_of_inplace(function: Any) -> int | None:
    """The place of the parameter ``inplace``, which some functions of ``torch.nn.functional`` have."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # not written in Python
        return None
    return parameters.index("inplace") if "inplace" in parameters else None


def _nodes(value: Any) -> list[Node]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]


def _is_of_torch(target: Any) -> bool:
    """Whether ``target`` is a function of PyTorch or Python, whose name tells whether it changes an argument."""
    module = getattr(target, "__module__", None) or ""
    of_torch = module.split(".")[0] in ("torch", "_operator", "builtins", "math") or bool(_name_of_function(target))
    return of_torch and not isinstance(target, HigherOrderOperator)


def may_overlap(first: Node, second: Node) -> bool:
    """Whether the tensors of two nodes may share memory: whether their extents in the same storage meet.

    The fake value of a view of a wrapper subclass may have another storage than its base. Views of wrapper subclasses
    may overlap if they are views of the same node.
    """
    roots = (_base_of(first), _base_of(second))
    if any(is_traceable_wrapper_subclass(value_of(root)) for root in roots):
        return roots[0] is roots[1]
    one, other = value_of(first), value_of(second)
    if not (one.layout is other.layout is torch.strided):
        return one.layout is other.layout
    if storage_id(one) != storage_id(other):
        return False
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    return not (statically_known_true(end <= other_begin) or statically_known_true(other_end <= begin))


def _base_of(node: Node) -> Node:
    """The tensor that ``node`` may be a view of; ``node`` itself if it is not a view."""
    while (call := read_call(node)) is not None and isinstance(call.get("input"), Node):
        changed = mutated_by(node)
        if not changed and call.name not in (*VIEWS, *PERMUTATIONS, *SAME_VALUE, *CASTS, *_PARTS):
            break
        node = changed[0] if changed else call.get("input")
    return node


def _extent(tensor: Tensor) -> tuple[Any, Any]:
    """The first byte of a tensor in its storage, and the byte after its last."""
    begin = tensor.storage_offset() * tensor.itemsize
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin, begin + length * tensor.itemsize


def is_same_view(first: Tensor, second: Tensor) -> bool:
    """Whether two fake tensors of the same storage view exactly the same elements in the same order."""
    place, other = ((*x.shape, *x.stride(), x.storage_offset()) for x in (first, second))
    return first.dtype is second.dtype and same_sizes(place, other)
