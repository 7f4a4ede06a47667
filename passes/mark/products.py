"""Read matrix products in Dynamo's graph (``matmul``, ``@``, ``bmm``, ``baddbmm``, ``einsum``) as contractions.

Every dimension of both operands and of the result becomes a named axis. Batch axes, which both operands and the result
have, are ``n0``, ``n1``, ... Axes of one operand only are ``l0``, ... (left) and ``r0``, ... (right). The contracted
axis is ``c``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.aten import Size
from kvcompile.passes.mark.axes import Axis, Layout, axes_of
from kvcompile.passes.mark.calls import CASTS, PERMUTATIONS, SAME_VALUE, VIEWS, Call, read_call, value_of

CONTRACTED = "c"


@dataclass(frozen=True)
class Contraction:
    """The labels of a product: one letter for every dimension of the operands and of the result.

    Attributes:
        node: the product.
        operands: left and right operand.
        labels: labels of the left and of the right operand.
        out: labels of the result, in its order.
        contracted: the label of both operands that the result lacks.
    """

    node: Node
    operands: tuple[Node, Node]
    labels: tuple[str, str]
    out: str
    contracted: str

    @property
    def batch(self) -> str:
        """The labels that both operands and the result have, in the order of the result."""
        return "".join(label for label in self.out if label in self.labels[0] and label in self.labels[1])

    def free(self, side: int) -> str:
        """The labels that only operand ``side`` has, in the order of the result."""
        return "".join(label for label in self.out if label not in self.labels[1 - side])

    def size(self, label: str) -> Size:
        """The size of a label. If one operand is broadcast along it, the other operand gives the size."""
        sizes: list[Size] = [
            value_of(operand).shape[labels.index(label)]
            for operand, labels in zip(self.operands, self.labels, strict=True)
            if label in labels
        ]
        return sizes[-1] if statically_known_true(sizes[0] == 1) else sizes[0]


def read_contraction(call: Call) -> Contraction | None:
    """Read a product of two tensors that contracts one dimension; None for anything else."""
    reader = _READERS.get(call.name)
    if reader is None or not isinstance(value_of(call.node), Tensor):
        return None
    operands, equation = reader(call)
    if equation is None or not all(isinstance(value_of(operand), Tensor) for operand in operands):
        return None
    labels, _, out = equation.partition("->")
    left, _, right = labels.partition(",")
    contracted = [label for label in left if label in right and label not in out]
    unique = all(len(set(part)) == len(part) for part in (left, right, out))
    covered = set(left) | set(right) == set(out) | set(contracted)
    fits = [len(part) for part in (left, right, out)] == [value_of(node).dim() for node in (*operands, call.node)]
    if len(contracted) != 1 or not unique or not covered or not fits:
        return None
    return Contraction(call.node, operands, (left, right), out, contracted[0])


def _read_matmul(call: Call) -> tuple[Any, str | None]:
    operands = (call.get("input"), call.get("other"))
    if not all(isinstance(value_of(operand), Tensor) for operand in operands):
        return operands, None
    left, right = (value_of(operand).dim() for operand in operands)
    if min(left, right) < 2:
        return operands, None
    batch = "abdefghijkl"[: max(left, right) - 2]
    return operands, f"{batch[len(batch) - left + 2 :]}mc,{batch[len(batch) - right + 2 :]}cn->{batch}mn"


def _read_bmm(call: Call) -> tuple[Any, str | None]:
    return (call.get("input"), call.get("mat2")), "bmc,bcn->bmn"


def _read_baddbmm(call: Call) -> tuple[Any, str | None]:
    return (call.get("batch1"), call.get("batch2")), "bmc,bcn->bmn"


def _read_einsum(call: Call) -> tuple[Any, str | None]:
    equation, *operands = call.node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return tuple(operands), None
    equation = equation.replace(" ", "")
    if "." in equation:
        equation = _without_ellipsis(equation, [value_of(operand).dim() for operand in operands])
    return tuple(operands), equation


def _without_ellipsis(equation: str, ranks: list[int]) -> str | None:
    """The equation with letters in the place of ``...``, right-aligned as in broadcasting; None if that fails."""
    unused = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in equation]
    terms, out = equation.split("->")
    parts = terms.split(",")
    counts = [rank - len(part) + 3 if "..." in part else 0 for part, rank in zip(parts, ranks, strict=False)]
    if len(parts) != 2 or min(counts) < 0 or max(counts) > len(unused):
        return None
    letters = unused[: max(counts)]
    parts = [part.replace("...", "".join(letters[len(letters) - n :])) for part, n in zip(parts, counts, strict=True)]
    return ",".join(parts) + "->" + out.replace("...", "".join(letters))


_READERS = {
    "matmul": _read_matmul,
    "bmm": _read_bmm,
    "baddbmm": _read_baddbmm,
    "einsum": _read_einsum,
}


@dataclass(frozen=True)
class Product:
    """A product with named axes.

    Attributes:
        node: the product.
        operands: left and right operand.
        layouts: layouts of the left and of the right operand.
        out: layout of the result.
        batch: names of the batch axes, slowest first.
        free: names of the axes that only the left operand has, and that only the right operand has, both in the order
            of the result.
    """

    node: Node
    operands: tuple[Node, Node]
    layouts: tuple[Layout, Layout]
    out: Layout
    batch: tuple[str, ...]
    free: tuple[tuple[str, ...], tuple[str, ...]]


def read_product(contraction: Contraction) -> Product:
    """Name the axes of a product.

    A single batch dimension is divided into batch and heads if a view nearby tells the number of heads. Attention is
    the same computation for every batch and head. A division that differs from the model's can therefore only fail to
    fit the views of the cache. The site is then refused.
    """
    axes: dict[str, tuple[Axis, ...]] = {contraction.contracted: axes_of(_axis(contraction, CONTRACTED))}
    batch = tuple(f"n{index}" for index in range(len(contraction.batch)))
    for name, label in zip(batch, contraction.batch, strict=True):
        axes[label] = axes_of(Axis(name, contraction.size(label)))
    free: list[tuple[str, ...]] = []
    for side, letter in enumerate("lr"):
        labels = contraction.free(side)
        free.append(tuple(f"{letter}{index}" for index in range(len(labels))))
        for name, label in zip(free[-1], labels, strict=True):
            axes[label] = axes_of(Axis(name, contraction.size(label)))
    num_heads = _num_heads(contraction)
    if num_heads is not None:
        label = contraction.batch
        axes[label] = axes_of(Axis("n0", contraction.size(label) // num_heads), Axis("n1", num_heads))
        batch = ("n0", "n1")
    layouts = [
        tuple(() if statically_known_true(size == 1) else axes[label] for label, size in _sizes(contraction, side))
        for side in (0, 1)
    ]
    out = tuple(axes[label] for label in contraction.out)
    return Product(contraction.node, contraction.operands, (layouts[0], layouts[1]), out, batch, (free[0], free[1]))


def _axis(contraction: Contraction, name: str) -> Axis:
    return Axis(name, contraction.size(contraction.contracted))


def _sizes(contraction: Contraction, side: int) -> list[tuple[str, Size]]:
    return list(zip(contraction.labels[side], value_of(contraction.operands[side]).shape, strict=True))


def _num_heads(contraction: Contraction) -> int | None:
    """The number of heads in a single batch dimension, batch * heads, that a view from or to four dimensions tells."""
    if len(contraction.batch) != 1:
        return None
    return num_heads_in(contraction.size(contraction.batch), contraction.node, tuple(reversed(contraction.operands)))


def num_heads_in(size: Size, result: Node, operands: tuple[Node, ...]) -> int | None:
    """The number of heads in a dimension of batch * heads = ``size``, the first of ``result`` and of ``operands``.

    A view from or to four dimensions tells it.
    """
    for view in (*_views_after(result), *(view for node in operands for view in _views_before(node))):
        shape = value_of(view).shape
        if len(shape) == 4 and isinstance(shape[1], int) and statically_known_true(shape[0] * shape[1] == size):
            return int(shape[1])
    return None


def repeats_heads(node: Node) -> bool:
    """Whether the views that make ``node`` from a cache repeat something, as the query heads of a KV head do."""
    call = read_call(node)
    while call is not None and call.name in (*VIEWS, *SAME_VALUE, *PERMUTATIONS, *CASTS):
        if call.name in ("expand", "expand_as"):
            return True
        node = call.get("input")
        call = read_call(node) if isinstance(node, Node) else None
    return call is not None and call.name in ("repeat_interleave", "repeat")


def _views_before(node: Any) -> list[Node]:
    """The tensors from which views, scaling and growth make ``node``, nearest first."""
    found: list[Node] = []
    while isinstance(node, Node):
        call = read_call(node)
        if call is not None and call.name == "cat":
            node = call.get("tensors")[0]
        elif call is not None and call.name in (*VIEWS, *SAME_VALUE, "transpose", "permute", "mT", "mul", "div"):
            node = call.get("input")
        else:
            break
        if isinstance(value_of(node), Tensor):
            found.append(node)
    return found


def _views_after(node: Node) -> list[Node]:
    """The views of ``node``."""
    calls = [read_call(user) for user in node.users]
    return [call.node for call in calls if call and call.name in VIEWS and isinstance(value_of(call.node), Tensor)]
