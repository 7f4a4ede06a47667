"""The Python text of the compiled function: the writes of all caches, and the attention that reads them."""

from __future__ import annotations

from fuzz.masked_text import masked, reorder
from fuzz.places import HEADS_FIRST, heads_first, index, stored_order
from fuzz.program import (
    BLOCK_SIZE,
    PAGES,
    POOLS,
    RETURNED,
    SHIFTING,
    SLOTS,
    STATIC,
    WINDOW,
    WITH_POSITIONS,
    Attention,
    Layer,
    Program,
    Write,
)
from fuzz.twists import TWISTS
from fuzz.write_text import FORMS, KEEP, Target

POSITIONS = {
    "given": "pos",
    "counted": "start + torch.arange(k.shape[2], device=k.device)",
    "ring": "pos % {tokens}",
    "negative": "pos - {tokens}",
    "flipped": "pos.flip(0)",
    "clamped": "pos.clamp(0, {tokens} - 1)",
    "summed": "pos[:1] + torch.ones_like(pos).cumsum(0) - 1",
    "chosen": "torch.where(pos < {tokens}, pos, pos - {tokens})",
    "from_data": "pos[0].item() + torch.arange(k.shape[2], device=k.device)",
}

VALUES = {
    "plain": "{x}",
    "projected": "{x} * 2.0 + 0.5",
    "strided": "{x}.transpose(1, 2).contiguous().transpose(1, 2)",
    "exchanged halves": "torch.cat([-{x}[..., {half}:], {x}[..., :{half}]], -1)",
    "one_head": "{x}[:, :1].expand(-1, {x}.shape[1], -1, -1)",
    "wide": "{x}.double()",
}

READS = {
    "whole": "{x}",
    "filled": "{x}[:, :, :start + k.shape[2]]",
    "first": "{x}[:, :, :{first}]",
    "narrow": "{x}.narrow(2, 0, {first})",
    "contiguous": "{x}.contiguous()",
    "turned": "{x}.mT.contiguous().mT",
    "sequences": "{x}[:k.shape[0]]",
    "rounded": "{x}.to(torch.float64).to(q.dtype)",
}

REPEATS = {
    "gqa": "{x}",
    "expand": "{x}[:, :, None].expand(-1, -1, {groups}, -1, -1).flatten(1, 2)",
    "interleave": "{x}.repeat_interleave({groups}, 1)",
    "tile": "{x}.repeat(1, {groups}, 1, 1)",
}

MASKS = {
    "none": [],
    "causal": [],
    "bool": ["mask = visible"],
    "bool_4": ["mask = visible[None, None]"],
    "padding": [
        "padding = torch.arange(k.shape[0], device=q.device)[:, None, None, None]",
        "mask = visible & (torch.arange(keys.shape[2], device=q.device) >= padding)",
    ],
    "window": ["mask = visible & (torch.arange(keys.shape[2], device=q.device) > rows[:, None] - 4)"],
    "additive": ["mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, -torch.inf)"],
    "lowest": [
        "lowest = torch.finfo(q.dtype).min",
        "mask = torch.where(visible, 0.0, lowest).to(q.dtype)[None, None]",
    ],
    "alibi": [
        "slopes = torch.arange(1, q.shape[1] + 1, device=q.device)[:, None, None]",
        "distances = torch.arange(keys.shape[2], device=q.device) - rows[:, None]",
        "mask = (0.125 * slopes * distances).masked_fill(~visible, -torch.inf).to(q.dtype)[None]",
    ],
    "hidden": ["mask = visible & (rows > rows.min())[:, None]"],
}
"""Masks; ``visible`` is [q_len, kv_len], and ``rows`` has the position of each query."""

ADDITIVE = ("additive", "lowest", "alibi")

SCORES = {
    "matmul": "q @ keys.mT * {scale}",
    "divided": "torch.matmul(q, keys.transpose(2, 3)) / {inverse}",
    "einsum": 'torch.einsum("bhqd,bhkd->bhqk", q, keys) * {scale}',
    "query_scaled": "(q * {scale}) @ keys.transpose(-1, -2)",
    "both_scaled": "(q * {root}) @ (keys * {root}).mT",
}

SOFTMAXES = {
    "softmax": ["weights = scores.softmax(-1)"],
    "float32": ["weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)"],
    "exponentials": [
        "weights = (scores - scores.amax(-1, keepdim=True)).exp()",
        "weights = weights / weights.sum(-1, keepdim=True)",
    ],
    "logsumexp": ["weights = (scores - scores.logsumexp(-1)[..., None]).exp()"],
    "log_softmax": ["weights = F.log_softmax(scores, dim=-1).exp()"],
}

STACKS = {
    "none": "",
    "first": "[{role}]",
    "second": "[:, {role}]",
    "unbind": ".unbind(0)[{role}]",
    "ranges": ".chunk(2, -1)[{role}]",
}
"""How keys and values are taken from one tensor."""


def step_text(program: Program) -> str:
    """The definition of ``step``, or of the class ``Model`` if a module holds the caches."""
    body = [line for number in range(len(program.layers)) for line in _layer(program, number)]
    tensors = stored_names(program)
    returned = [name for name in tensors if program.layers[int(name[-1])].kind in RETURNED]
    values = [f"extra{number}" for number, layer in enumerate(program.layers) if TWISTS[layer.twist].returns]
    loads: list[str] = []
    if program.holder == "dict":
        loads = [f'{name} = c["{name}"]' for name in tensors]
        body += [f'c["{name}"] = {name}' for name in returned]
    elif program.holder == "module":
        loads = [f"{name} = self.{name}" for name in tensors]
        body += [f"self.{name} = {name}" for name in returned]
    else:
        values += returned
    body = [*loads, *body, f"return {', '.join(['q', *values])}"]
    signature = ", ".join(arguments(program, "\n".join(body)))
    if program.holder != "module":
        return f"def step({signature}):\n" + indented(body)
    return (
        "class Model(nn.Module):\n"
        f"    def __init__(self, {', '.join(tensors)}):\n        super().__init__()\n"
        + indented([f'self.register_buffer("{name}", {name})' for name in tensors], 2)
        + f"\n\n    def forward(self, {signature}):\n"
        + indented(body, 2)
    )


def stored_names(program: Program) -> list[str]:
    """The names of the tensors that hold the caches."""
    layers = range(len(program.layers))
    if program.stack != "none":
        return [f"kv{number}" for number in layers]
    return [f"{role}{number}" for number in layers for role in "kv"]


def arguments(program: Program, body: str) -> list[str]:
    """The parameters of ``step``, as far as ``body`` uses them."""
    first = {"dict": ["c"], "module": [], "arguments": []}[program.holder]
    given = [name for name in ("pos", "start", "mask", "table", "beams") if _uses(body, name)]
    last = stored_names(program) if program.holder == "arguments" else []
    base = ["base"] if any(TWISTS[layer.twist].needs_base for layer in program.layers) else []
    return [*first, "q", "k", "v", *given, *last, *base]


def _uses(body: str, name: str) -> bool:
    if name == "mask":
        return "given_mask" in body or "mask = mask[" in body
    words = body.replace("(", " ").replace("[", " ").replace(".", " ").replace(":", " ").replace(")", " ")
    return name in words.replace(",", " ").replace("]", " ").split()


def indented(lines: list[str], depth: int = 1) -> str:
    return "\n".join("    " * depth + line for line in lines)


def _layer(program: Program, number: int) -> list[str]:
    layer = program.layers[number]
    key, value = f"k{number}", f"v{number}"
    lines = []
    if program.stack != "none":
        lines += [
            f"{name} = kv{number}{STACKS[program.stack].format(role=role)}" for role, name in enumerate((key, value))
        ]
    twist = TWISTS[layer.twist]
    names = {
        "x": "k" if layer.kind in POOLS else stored_order("k", layer.axes),
        "K": key,
        "V": value,
        "t": layer.axes.index("t"),
        "keys": _viewed(layer, key),
        "values": _viewed(layer, value),
        "number": number,
        "half": program.sizes.head_dim // 2,
    }
    if layer.kind in POOLS:
        lines += [f"slots = table[:, pos // {BLOCK_SIZE}] * {BLOCK_SIZE} + pos % {BLOCK_SIZE}"]
    lines += twist.text("before", names) + _reorder(program, number, "before")
    writes = [_write(program, layer, key, "k", layer.key), _write(program, layer, value, "v", layer.value)]
    for write in reversed(writes) if layer.value_first else writes:
        lines += write
    names |= {"keys": _viewed(layer, key), "values": _viewed(layer, value)}
    lines += _reorder(program, number, "written") + twist.text("written", names)
    lines += [f"keys = {twist.read_as.format(x=_read(program, layer, key))}"]
    lines += [f"values = {twist.read_as.format(x=_read(program, layer, value))}"]
    lines += twist.text("read", names)
    lines += _attention(program, layer)
    if layer.kind == WINDOW:
        for name, write in ((key, layer.key), (value, layer.value)):
            if write.form == "keep_the_last":
                lines += [f"{name} = {name}[{index(layer.axes, t=f'-{KEEP}:')}]"]
    lines += _reorder(program, number, "after") + twist.text("after", names)
    lines += ["q = q + out"]
    return lines


def _viewed(layer: Layer, name: str) -> str:
    return name if layer.kind in POOLS else heads_first(name, layer.axes)


def _write(program: Program, layer: Layer, name: str, new: str, write: Write) -> list[str]:
    sizes, form = program.sizes, write.form
    vectors = VALUES[write.values].format(x=new, half=sizes.head_dim // 2)
    lines = []
    if write.values != "plain":
        lines, vectors = [f"new_{new} = {vectors}"], f"new_{new}"
    positions = POSITIONS[write.positions].format(tokens=sizes.tokens)
    if write.through_view and layer.kind in (STATIC, SHIFTING) and layer.axes != HEADS_FIRST:
        lines += [f"view = {heads_first(name, layer.axes)}"]
        to = Target("view", HEADS_FIRST, vectors, vectors, positions)
    elif layer.kind in POOLS:
        to = Target(name, layer.axes, vectors, vectors, positions)
    else:
        to = Target(name, layer.axes, stored_order(vectors, layer.axes), vectors, positions)
    write_to = FORMS[layer.kind][form]
    if write.mask != "all":
        return [*lines, *masked(to, form, write.mask, write.way, write_to)]
    return [*lines, *write_to(to)]


def _reorder(program: Program, number: int, place: str) -> list[str]:
    layer = program.layers[number]
    how = layer.reorder
    if how is None or how.place != place:
        return []
    if program.stack != "none" and how.of_stack:
        places = {"second": layer.axes[:1] + "s" + layer.axes[1:], "ranges": layer.axes}
        axes = places.get(program.stack, "s" + layer.axes)
        return [reorder(f"kv{number}", axes, how.form, False)]
    return [reorder(f"{role}{number}", layer.axes, how.form, layer.kind in RETURNED) for role in how.roles]


def _read(program: Program, layer: Layer, name: str) -> str:
    if layer.kind == SLOTS:
        slots = f"(table[:, :, None] * {BLOCK_SIZE} + torch.arange({BLOCK_SIZE}, device=q.device)).flatten(1)"
        return f"{name}[{slots}].transpose(1, 2)"
    if layer.kind == PAGES:
        if layer.axes == "phtd":
            return f"{name}[table].permute(0, 2, 1, 3, 4).flatten(2, 3)"
        return f"{name}[table].flatten(1, 2).transpose(1, 2)"
    return READS[layer.attention.read].format(x=heads_first(name, layer.axes), first=program.sizes.tokens - 1)


def _attention(program: Program, layer: Layer) -> list[str]:
    how, sizes = layer.attention, program.sizes
    lines: list[str] = []
    if how.mask not in ("none", "causal"):
        if how.mask_is_argument:
            lines += ["mask = mask[..., :keys.shape[2]]"]
        else:
            lines += [*mask_text(how.mask, rows_text(layer))]
    if how.repeat != "gqa" and how.form != "grouped":
        repeated = (REPEATS[how.repeat].format(x=x, groups=sizes.groups) for x in ("keys", "values"))
        lines += ["keys, values = " + ", ".join(repeated)]
    if how.form in ("sdpa", "rank_3"):
        return [*lines, _sdpa(how, sizes.groups)]
    return [*lines, *_written_out(how, sizes.kv_heads, sizes.head_dim)]


def rows_text(layer: Layer) -> str:
    """The position of each query, as text."""
    if layer.kind in (*WITH_POSITIONS, *POOLS):
        return "pos"
    return "torch.arange(q.shape[2], device=q.device) + (keys.shape[2] - q.shape[2])"


def mask_text(mask: str, rows: str) -> list[str]:
    return [
        f"rows = {rows}",
        "visible = torch.arange(keys.shape[2], device=q.device) <= rows[:, None]",
        *MASKS[mask],
    ]


def _sdpa(how: Attention, groups: int) -> str:
    options = []
    if how.mask == "causal":
        options += ["is_causal=True"]
    elif how.mask != "none":
        options += ["attn_mask=mask"]
    if how.scale is not None:
        options += [f"scale={how.scale}"]
    if how.repeat == "gqa" and groups > 1:
        options += ["enable_gqa=True"]
    if how.form == "rank_3":
        return f"out = F.scaled_dot_product_attention({', '.join(['q[0]', 'keys[0]', 'values[0]', *options])})[None]"
    return f"out = F.scaled_dot_product_attention({', '.join(['q', 'keys', 'values', *options])})"


def _written_out(how: Attention, kv_heads: int, head_dim: int) -> list[str]:
    scale = how.scale if how.scale is not None else round(head_dim**-0.5, 6)
    texts = {"scale": scale, "inverse": round(1 / scale, 6), "root": round(scale**0.5, 6)}
    grouped = how.form == "grouped"
    if grouped:
        lines = [
            f"query = q.unflatten(1, ({kv_heads}, -1))",
            f'scores = (torch.einsum("bgrqd,bgkd->bgrqk", query, keys) * {scale}).flatten(1, 2)',
        ]
    else:
        lines = [f"scores = {SCORES[how.scores].format(**texts)}"]
    if how.softcap:
        lines += ["scores = torch.tanh(scores / 2.0) * 2.0"]
    if how.mask in ADDITIVE:
        lines += ["scores = scores + mask"]
    elif how.mask not in ("none", "causal"):
        lines += ["scores = scores.masked_fill(~mask, -torch.inf)"]
    lines += SOFTMAXES[how.softmax]
    if grouped:
        weights = f"weights.unflatten(1, ({kv_heads}, -1))"
        return [*lines, f'out = torch.einsum("bgrqk,bgkd->bgrqd", {weights}, values).flatten(1, 2)']
    return [*lines, "out = weights @ values"]
