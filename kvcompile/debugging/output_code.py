"""Marks the calls on packed caches in code that Inductor generated."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvcompile.debugging.region_calls import roles_of_region_calls, statements_of

_CHECKS = ("assert_size_stride", "assert_alignment")
_OPERATORS = "torch.ops.kvcompile."
_VIEWS = ("torch.ops.aten.view", "torch.ops.aten.reshape", "reinterpret_tensor")
_REGION = "kvquant_"
_STORE = " store"

PACKED_INPUT = re.compile(r"^#\s+(\w+_packed)\b.*  (\S[^\n]*?: packed [^\n]*)$", re.MULTILINE)
"""A packed cache among the inputs that the text of a rewritten graph lists: its name, and its role for a site."""

Roles = tuple[str, ...]


@dataclass(frozen=True)
class PackedParts:
    """The facts about packed caches in a rewritten graph.

    Attributes:
        inputs: the roles of packed caches among the inputs, by name: ``layers.0: packed key cache``.
        outputs: the roles of packed caches that the graph makes and returns, by their places among the outputs.
        regions: for each region, the role of each of its calls in the order of execution: ``layers.0: key store``. If
            the order is ambiguous, a call has all possible roles.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[int, str] = field(default_factory=dict)
    regions: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, rewritten: str) -> PackedParts:
        """Reads the text of a rewritten graph (:func:`kvcompile.debugging.stages.readable`)."""
        inputs = dict(PACKED_INPUT.findall(rewritten))
        statements, returned = statements_of(rewritten)
        stored = {one.name: _cache_of(one.role) for one in statements if one.role.endswith(_STORE)}
        outputs = {place: stored[name] for place, name in enumerate(returned) if name in stored}
        return cls(inputs, outputs, roles_of_region_calls(statements, _REGION))


def marked(code: str, packed: PackedParts) -> str:
    """The code with a comment above every call on packed caches: kernels, regions and operators of kvcompile.

    A call that stores has a heading.

    Args:
        code: Python that Inductor generated. Code that does not parse is returned unchanged.
        packed: the facts about the graph from which the code was generated.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return code
    lines = code.splitlines(keepends=True)
    comments = _Marks(tree, lines, packed).comments
    for number in sorted(comments, reverse=True):
        line = lines[number - 1]
        indent = line[: len(line) - len(line.lstrip())]
        found = "; ".join(comments[number])
        lines.insert(number - 1, f"{indent}# kvquant: {f'==== {found} ====' if _STORE in found else found}\n")
    return "".join(lines)


class _Marks:
    """The comments of one text, by line.

    Each buffer has one name in generated code. Views of a packed cache count as packed caches, as do the corresponding
    parameters of a region.
    """

    def __init__(self, tree: ast.Module, lines: Sequence[str], packed: PackedParts) -> None:
        self.comments: dict[int, Roles] = {}
        self._lines = lines
        self._roles: dict[str, Roles] = {name: (role,) for name, role in packed.inputs.items()}
        self._written = _written_arguments(tree)
        self._regions = {name: list(roles) for name, roles in packed.regions.items()}
        self._called: dict[str, list[list[Roles]]] = {}
        self._lists: dict[str, list[ast.expr]] = {}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        regions = [function for function in functions if function.name.startswith(_REGION)]
        self._add_outputs([function for function in functions if function.name == "call"], packed.outputs)
        inner = {statement for region in regions for statement in ast.walk(region)}
        self._read(statement for statement in ast.walk(tree) if statement not in inner)
        for region in regions:
            self._add_parameters(region)
            self._read(ast.walk(region))

    def _add_outputs(self, calls: Sequence[ast.FunctionDef], outputs: Mapping[int, str]) -> None:
        for call in calls:
            returned = next((node.value for node in reversed(call.body) if isinstance(node, ast.Return)), None)
            for place, value in enumerate(returned.elts if isinstance(returned, ast.Tuple) else ()):
                if place in outputs:
                    self._roles |= dict.fromkeys(_names(value), (outputs[place],))

    def _add_parameters(self, region: ast.FunctionDef) -> None:
        """Give the parameters of a region the roles of the arguments in its calls, without layers if they differ."""
        first = region.body[0] if region.body else None
        target = first.targets[0] if isinstance(first, ast.Assign) else None
        parameters = target.elts if isinstance(target, ast.Tuple) else ()
        for place, parameter in enumerate(parameters):
            calls = [call[place] for call in self._called.get(region.name, ()) if place < len(call)]
            if isinstance(parameter, ast.Name) and calls and all(calls):
                if len(set(calls)) > 1:
                    calls = [tuple(role.rpartition(": ")[2] for role in call) for call in calls]
                self._roles[parameter.id] = tuple(dict.fromkeys(role for call in calls for role in call))

    def _read(self, nodes: Iterable[ast.AST]) -> None:
        statements = [node for node in nodes if isinstance(node, (ast.Expr, ast.Assign))]
        for statement in sorted(statements, key=lambda node: node.lineno):
            value = statement.value
            called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            if isinstance(statement, ast.Assign) and (not called or called.startswith(_VIEWS)):
                self._assign(statement)
            elif isinstance(value, ast.Call) and called not in _CHECKS:
                found = tuple(dict.fromkeys(self._found(called, value)))
                if found:
                    self.comments[statement.lineno] = found

    def _assign(self, statement: ast.Assign) -> None:
        if "# reuse" in self._lines[statement.lineno - 1]:
            return  # another buffer reuses the memory of a buffer that is no longer needed
        roles = self._roles_in(statement.value)
        for target in statement.targets:
            if isinstance(target, ast.Name):
                if isinstance(statement.value, ast.List):
                    self._lists[target.id] = statement.value.elts
                if roles:
                    self._roles[target.id] = roles

    def _found(self, called: str, call: ast.Call) -> Iterator[str]:
        if called.startswith(_OPERATORS):
            operator = called.removeprefix("torch.ops.")
            yield f"{operator}{_STORE}" if operator.startswith("kvcompile.store") else operator
        if called.startswith(_REGION):
            roles = self._regions.get(called)
            earlier = self._called.setdefault(called, [])
            yield roles[len(earlier)] if roles and len(earlier) < len(roles) else called
            earlier.append([self._roles_in(argument) for argument in self._arguments(call)])
        written = self._written.get(called, frozenset())
        for place, argument in enumerate(call.args):
            for role in self._roles_in(argument):
                yield _store_of(role) if place in written else role

    def _arguments(self, call: ast.Call) -> list[ast.expr]:
        """The arguments of a region, which generated code passes in a list."""
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Name):
            return self._lists.get(first.id, [])
        return first.elts if isinstance(first, ast.List) else []

    def _roles_in(self, value: ast.expr) -> Roles:
        return tuple(dict.fromkeys(role for name in _names(value) for role in self._roles.get(name, ())))


def _names(value: ast.expr) -> list[str]:
    """The names in an expression, in the order of the text."""
    names = [node for node in ast.walk(value) if isinstance(node, ast.Name)]
    return [node.id for node in sorted(names, key=lambda node: (node.lineno, node.col_offset))]


def _written_arguments(tree: ast.Module) -> dict[str, frozenset[int]]:
    """The positions of the arguments that each C++ kernel may write, whose types are not ``const``."""
    written = {}
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Assign) else None
        if not (isinstance(statement, ast.Assign) and isinstance(value, ast.Call) and value.args):
            continue
        types, target = value.args[0], statement.targets[0]
        if ast.unparse(value.func).endswith("cpp_pybinding") and isinstance(types, ast.List):
            texts = [ast.unparse(one) for one in types.elts]
            places = frozenset(place for place, text in enumerate(texts) if "*" in text and "const" not in text)
            written[ast.unparse(target)] = places
    return written


def _cache_of(store: str) -> str:
    """``layers.0: packed key cache`` for ``layers.0: key store``."""
    module, _, name = store.removesuffix(_STORE).rpartition(": ")
    return f"{module}: packed {name} cache"


def _store_of(cache: str) -> str:
    """``layers.0: key store`` for ``layers.0: packed key cache``."""
    return re.sub(r"packed (.*) cache$", rf"\1{_STORE}", cache)
