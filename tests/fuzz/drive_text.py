"""The Python text around the compiled function: its caches, its calls, and the eager code between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fuzz.places import index
from fuzz.program import (
    BLOCK_SIZE,
    EXTENDED,
    GROWING,
    PAGES,
    POOLS,
    READ_ONLY,
    RETURNED,
    SLOTS,
    WINDOW,
    Layer,
    Program,
    Step,
)
from fuzz.step_text import arguments, indented, mask_text, step_text, stored_names
from fuzz.twists import TWISTS
from fuzz.write_text import KEEP

INITIAL = {GROWING: 3, WINDOW: KEEP}
"""The tokens that a cache of growing size begins with."""

MEMORY = {
    "own": "{cache}",
    "offset": "new({more})[1:]",
    "strided": "new({swapped}).transpose(0, 1)",
    "wider": "new({shape}, 2).select(-1, 0)",
}
"""How a cache lies in memory. The further forms, in :func:`_aliased`, let several caches share memory."""

ALIASED = ("same", "halves", "overlapping", "shared_by_layers")

BETWEEN = {
    "nothing": (),
    "reorder": ("{x}.copy_({x}.index_select({b}, new.order({batch})))",),
    "select": ("{x} = {x}.index_select({b}, new.order({batch}))",),
    "snapshot": ("saved_{name} = {x}.clone()",),
    "restore": ("{x}.copy_(saved_{name})",),
    "take_back": ("{x} = saved_{name}",),
    "zero": ("{x}.zero_()",),
    "assign": ("{x}[{first_tokens}] = 0.5",),
    "write": ("{x}.index_copy_({t}, new.range(1, 2), {x}.narrow({t}, 0, 1))",),
    "copy_sequence": ("{x}[{first}] = {x}[{last}]",),
    "masked": ("{x}[{x} > 1.0] = 0.0",),
    "add": ("{x}.add_(1.0)",),
    "view": ("seen_{name} = {x}.narrow({t}, 0, 2)",),
    "hold": ("seen_{name} = {x}",),
    "unsqueezed": ("seen_{name} = {x}.unsqueeze(0)",),
    "read": ("yield {x}.sum(-1), {x}[{first_tokens}], {x}.float().amax({t}), {x}.transpose(0, 1).contiguous()",),
    "truncate": ("{x} = {x}.narrow({t}, 0, {x}.shape[{t}] - 1)",),
    "clone": ("{x} = {x}.clone()",),
    "fresh": ("{x} = {fresh}",),
    "fewer": ("{x} = {x}.narrow({b}, 0, 1).clone()",),
    "more": ("{x} = {x}.repeat_interleave(2, {b})",),
    "deepcopy": (),
    "swap": (),
}
"""Eager code between two steps, for each stored tensor."""

OF_ANY = ("nothing", "snapshot", "zero", "clone", "deepcopy", "fresh")
"""The code that also applies to pools and stacks."""

KEEPS_SIZE = (*OF_ANY, "reorder", "select", "restore", "assign", "write", "copy_sequence", "masked", "add", "view",
              "hold", "unsqueezed", "read", "fewer", "more", "swap")  # fmt: skip
CHANGES_SIZE = (
    *OF_ANY,
    "select",
    "take_back",
    "view",
    "hold",
    "unsqueezed",
    "read",
    "truncate",
    "fewer",
    "more",
    "swap",
)


def drive_text(program: Program, name: str = "drive") -> str:
    """The generator ``drive(compile, new)``, which calls the compiled function of :func:`fuzz.step_text.step_text`.

    It yields what must be equal: the results of each step, all caches, and what eager code reads.
    """
    return f"def {name}(compile, new):\n" + indented(list(_Drive(program).lines())) + "\n"


@dataclass
class _Drive:
    """Writes ``drive``, and follows the sizes of the caches meanwhile."""

    program: Program
    batch: int = 0
    start: int = 0
    kept: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        program = self.program
        self.batch = program.sizes.batch
        if any(layer.kind in POOLS for layer in program.layers):
            yield f"table = new.table({self.batch}, {-(-program.sizes.tokens // BLOCK_SIZE)})"
        yield from self._make_caches()
        for step in program.steps:
            yield from self._between(step)
            yield from self._call(step)

    @property
    def _names(self) -> list[str]:
        return stored_names(self.program)

    @property
    def _needs_base(self) -> bool:
        return any(TWISTS[layer.twist].needs_base for layer in self.program.layers)

    def _layer(self, name: str) -> Layer:
        return self.program.layers[int(name[-1])]

    def _make_caches(self) -> Iterator[str]:
        values = {}
        memory = self.program.memory
        if memory in ALIASED or self._needs_base:
            yield from self._shared_memory(values)
        else:
            values = {name: self._in_memory(name) for name in self._names}
        if self.program.holder == "dict":
            yield "c = {" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"
            yield "run = compile(step)"
        elif self.program.holder == "module":
            yield f"model = Model({', '.join(values.values())})"
            yield "run = compile(model)"
        else:
            yield from (f"{name} = {value}" for name, value in values.items() if name != value)
            yield "run = compile(step)"

    def _shared_memory(self, values: dict[str, str]) -> Iterator[str]:
        memory = self.program.memory if not self._needs_base else "halves"
        for name in self._names:
            shape = self._shape(name)
            sizes = ", ".join(map(str, shape))
            twin = f"base{name[-1]}"
            if name.startswith("k"):
                if memory == "shared_by_layers" and name[-1] != "0":
                    values[name] = values[name[:-1] + "0"]
                    continue
                first = "base" if self._needs_base else twin
                if self._needs_base and name[-1] != "0":
                    values[name] = self._fresh(name)
                    continue
                doubled = {"same": sizes, "halves": f"2, {sizes}", "shared_by_layers": f"2, {sizes}"}
                yield f"{first} = new({doubled.get(memory, self._overlapping(name, shape))})"
                takes = {
                    "same": first,
                    "overlapping": f"{first}[{index(self._layer(name).axes, t=f':{self._tokens(name)}')}]",
                }
                values[name] = takes.get(memory, f"{first}[0]")
            elif memory == "shared_by_layers" and name[-1] != "0":
                values[name] = values[name[:-1] + "0"]
            else:
                first = "base" if self._needs_base else twin
                if self._needs_base and name[-1] != "0":
                    values[name] = self._fresh(name)
                    continue
                takes = {"same": first, "overlapping": f"{first}[{index(self._layer(name).axes, t='2:')}]"}
                values[name] = takes.get(memory, f"{first}[1]")

    def _overlapping(self, name: str, shape: list[int]) -> str:
        at = self._layer(name).axes.index("t")
        return ", ".join(str(size + 2 * (dim == at)) for dim, size in enumerate(shape))

    def _tokens(self, name: str) -> int:
        return INITIAL.get(self._layer(name).kind, self.program.sizes.tokens)

    def _shape(self, name: str) -> list[int]:
        layer, sizes = self._layer(name), self.program.sizes
        pages = self.batch * -(-sizes.tokens // BLOCK_SIZE) + 1
        of_axis = {"b": self.batch, "h": sizes.kv_heads, "t": self._tokens(name), "d": sizes.head_dim, "p": pages}
        of_axis["m"] = sizes.kv_heads * sizes.head_dim
        if layer.kind == SLOTS:
            of_axis["t"] = pages * BLOCK_SIZE
        if layer.kind == PAGES:
            of_axis["t"] = BLOCK_SIZE
        shape = [of_axis[axis] for axis in layer.axes]
        if name.startswith("kv") and self.program.stack == "ranges":
            shape[-1] *= 2
        elif name.startswith("kv"):
            shape.insert(1 if self.program.stack == "second" else 0, 2)
        return shape

    def _plain(self, name: str) -> str:
        return f"new({', '.join(map(str, self._shape(name)))})"

    def _fresh(self, name: str) -> str:
        """A cache in separate memory; the reference of a lossy format packs it."""
        layer, shape = self._layer(name), self._shape(name)
        if layer.kind in POOLS or name.startswith("kv"):
            return self._plain(name)
        role, options = "key" if name.startswith("k") else "value", ", growing=True" if layer.kind in EXTENDED else ""
        if "m" in layer.axes:
            options += f", head_dim={self.program.sizes.head_dim}"
        cache = f'new.cache("{role}", "{layer.axes}", {", ".join(map(str, shape))}{options})'
        return f"kvcompile.pack_({cache})" if layer.kind == READ_ONLY else cache

    def _in_memory(self, name: str) -> str:
        shape = self._shape(name)
        texts = {
            "cache": self._fresh(name),
            "shape": ", ".join(map(str, shape)),
            "more": ", ".join(map(str, [shape[0] + 1, *shape[1:]])),
            "swapped": ", ".join(map(str, [shape[1], shape[0], *shape[2:]])),
        }
        return MEMORY[self.program.memory].format(**texts)

    def _ref(self, name: str) -> str:
        return {"dict": f'c["{name}"]', "module": f"model.{name}", "arguments": name}[self.program.holder]

    def _between(self, step: Step) -> Iterator[str]:
        holder = self.program.holder
        if step.before == "deepcopy":
            if holder == "arguments":
                yield from (f"{name} = copy.deepcopy({name})" for name in self._names)
            else:
                whole = {"dict": "c", "module": "model"}[holder]
                yield f"{whole} = copy.deepcopy({whole})"
                yield from ["run = compile(model)"] if holder == "module" else []
        # Inductor does not guard the offsets of tensors that share memory: plain Inductor is wrong after they change.
        if step.before == "swap" and self.program.stack == "none" and self.program.memory not in ALIASED:
            for number in range(len(self.program.layers)):
                key, value = self._ref(f"k{number}"), self._ref(f"v{number}")
                yield f"{key}, {value} = {value}, {key}"
        if step.before in ("restore", "take_back") and not self.saved:
            return
        if step.before == "fewer":
            self.batch = 1
        for name in self._names:
            yield from (line.format(**self._places(name)) for line in BETWEEN[step.before])
        if step.before == "more":
            self.batch *= 2
        if step.before == "snapshot":
            self.saved = list(self._names)
        if step.before in ("view", "hold", "unsqueezed"):
            self.kept += [f"seen_{name}" for name in self._names if f"seen_{name}" not in self.kept]
        if step.before == "truncate":
            self.start -= 1

    def _places(self, name: str) -> dict[str, object]:
        axes = self._layer(name).axes
        return {
            "x": self._ref(name),
            "name": name,
            "b": axes.find("b"),
            "t": axes.find("t"),
            "batch": self.batch,
            "fresh": self._fresh(name),
            "first_tokens": index(axes, t=":2") if "t" in axes else ":2",
            "first": index(axes, b="0") if "b" in axes else "0",
            "last": index(axes, b="-1") if "b" in axes else "-1",
        }

    def _call(self, step: Step) -> Iterator[str]:
        program, sizes, n = self.program, self.program.sizes, step.tokens
        of_new = (
            f"new({self.batch}, {heads}, {n}, {sizes.head_dim})"
            for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        )
        given = [name for name in arguments(program, step_text(program)) if name not in ("c", "base", *self._names)]
        yield f"q, k, v = {', '.join(of_new)}"
        if "pos" in given or "mask" in given:
            yield f"pos = new.range({self.start}, {self.start + n})"
        if "beams" in given:
            yield f"beams = new.beams({self.batch})"
        if "mask" in given:
            layer = next(layer for layer in program.layers if layer.attention.mask_is_argument)
            total = sizes.tokens if layer.kind not in POOLS else -(-sizes.tokens // BLOCK_SIZE) * BLOCK_SIZE
            yield from (line.replace("keys.shape[2]", str(total)) for line in mask_text(layer.attention.mask, "pos"))
        values = [str(self.start) if name == "start" else name for name in given]
        first = ["c"] if program.holder == "dict" else []
        last = self._names if program.holder == "arguments" else []
        base = ["base"] if self._needs_base else []
        extras = [f"extra{number}" for number, layer in enumerate(program.layers) if TWISTS[layer.twist].returns]
        returned = [name for name in last if self._layer(name).kind in RETURNED]
        yield f"{', '.join(['out', *extras, *returned])} = run({', '.join([*first, *values, *last, *base])})"
        yield f"yield {', '.join(['out', *extras, *map(self._ref, self._names), *self.kept, *base])}"
        self.start += n
