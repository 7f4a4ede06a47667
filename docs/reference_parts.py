"""The generated parts of the reference pages: passes, formats, presets, policy fields, refusals.

Every public function returns Markdown for one part; :mod:`make_pages` puts the parts into the pages.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import sympy
import torch

from kvcompile.cli.policy_schema import policy_schema
from kvcompile.compat import versions
from kvcompile.kernels.formats import FORMATS, LATENT_FORMATS, bases, bit_planes, get_format
from kvcompile.kernels.formats.base import HEAD_DIM, Format
from kvcompile.kernels.lang.gpus import GPUS
from kvcompile.kernels.layout import packed_layout as layout
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.pipeline import PIPELINE
from kvcompile.passes.refusal import Reason
from kvcompile.policy import policy, presets
from kvcompile.report.data import NOT_REFUSED

HEAD_DIMS = (64, 128, 256)
SHORT_DTYPES = {torch.uint8: "8-bit", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; cells may hold ``|``."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def from_docstring(thing: Any) -> tuple[str, str]:
    """The first sentence of a docstring and the paragraphs after it, as Markdown."""
    text = inspect.getdoc(thing) or ""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")
    head, _, body = text.partition("\n\n")
    return " ".join(head.split()), body


# Releases


def tested_releases() -> str:
    """The latest test of every release of PyTorch."""
    return table(versions.COLUMNS, versions.rows())


# GPUs


def gpus() -> str:
    """The facts about each GPU: whether it was tested, and the resources that its compiled kernels take."""
    compiled = json.loads((Path(__file__).parent / "kernels_by_gpu.json").read_text(encoding="utf-8"))
    rows = []
    for gpu in GPUS:
        found = compiled["gpus"][gpu.architecture.replace(".", "")]
        share = f"{found['shared'] / 1024:.0f} of {found['limit'] / 1024:.0f} KiB"
        standing = gpu.standing + (" and compiled" if gpu.standing == "tested" else " only")
        calls = f"{found['calls']:,} of {found['of']:,}"
        counts = f"{found['kernels']:,}", share, found["slow"]
        rows.append((gpu.devices, gpu.architecture, standing, calls, *counts))
    rows.append(("T4, RTX 2080, V100 and older", "below 8.0", "refused", *[""] * 4))
    rows.append(("other GPUs of AMD", "other names", "refused", *[""] * 4))
    header = ("GPU", "architecture", "standing", "calls", "kernels", "largest program", "slow calls")
    return table(header, [tuple(map(str, row)) for row in rows])


def compiled_with() -> str:
    """The release of Triton that compiled the kernels of :func:`gpus`, and when."""
    found = json.loads((Path(__file__).parent / "kernels_by_gpu.json").read_text(encoding="utf-8"))
    return f"The kernels were compiled with Triton {found['triton']} on {found['date']}."


# Passes


def pipeline_passes() -> str:
    """Every pass that packs a graph: its number in a dump, its name, what it relies on and what it keeps."""
    rows = [(f"{number:02}", f"`{step.name}`", step.relies_on, step.keeps) for number, step in enumerate(PIPELINE, 1)]
    return table(("", "pass", "relies on", "keeps"), rows)


# Formats


def format_families() -> str:
    """The docstring of every file of formats, and the bytes of its formats."""
    families: dict[ModuleType, list[Format]] = {}
    calibrated = map(get_format, (*presets.CALIBRATED_NAMES, "uniform_4321"))
    for fmt in (*FORMATS.values(), *calibrated, *LATENT_FORMATS.values()):
        families.setdefault(sys.modules[type(fmt).__module__], []).append(fmt)
    return "\n\n".join(_family(module, formats) for module, formats in families.items())


def _family(module: ModuleType, formats: list[Format]) -> str:
    head, body = from_docstring(module)
    header = ["format", "bits", "scale and zero point", "rotated", "bytes a vector", *map(str, HEAD_DIMS), "metadata"]
    rows = [_format_row(fmt) for fmt in formats if fmt.fixed_head_dim is None]
    fixed = [
        f"`{fmt.name}`: {fmt.bytes_per_token()} bytes a vector of {fmt.fixed_head_dim} channels."
        for fmt in formats
        if fmt.fixed_head_dim is not None
    ]
    parts = [f"### {head.rstrip('.')}", body, table(header, rows) if rows else "", *fixed, *_unusable(formats)]
    return "\n\n".join(part for part in parts if part)


def _format_row(fmt: Format) -> list[str]:
    nbytes = fmt.bytes_per_token()
    rotated = (
        "basis"
        if fmt.has_matrices
        else f"seed {fmt.rotation_seed}"
        if fmt.rotation_seed
        else "yes"
        if fmt.rotated
        else ""
    )
    payload = HEAD_DIM * sympy.Rational(fmt.packing.bits) / 8
    share = f"{100 * float(((nbytes - payload) / payload).subs(HEAD_DIM, 128)):.2g} %"
    return [f"`{fmt.name}`", f"{fmt.bits:g}", _metadata(fmt), rotated, f"`{nbytes}`", *_sizes(nbytes), share]


def _sizes(nbytes: sympy.Expr) -> list[str]:
    values = [nbytes.subs(HEAD_DIM, head_dim) for head_dim in HEAD_DIMS]
    return [str(value) if value.is_integer else "" for value in values]


def _metadata(fmt: Format) -> str:
    parts = [
        f"{SHORT_DTYPES[dtype]} {name}"
        for name, dtype in (("scale", fmt.scale_dtype), ("zero point", fmt.zero_dtype))
        if dtype is not None
    ]
    of = {
        "token": "a vector",
        "group": f"{fmt.group_size} channels",
        "plane": "a run of channels",
        "channel": f"a channel of {layout.BLOCK_TOKENS} tokens",
    }
    return f"{' and '.join(parts)} for {of[fmt.granularity]}" if parts else "none"


def _unusable(formats: list[Format]) -> list[str]:
    """A sentence for every reason for which formats cannot be used in a policy."""
    names: dict[str, list[str]] = {}
    for fmt in formats:
        reasons = {role: fmt.unsupported(fmt.fixed_head_dim or 256, role) for role in ("key", "value")}
        if all(reasons.values()):
            names.setdefault(str(reasons["key"]), []).append(f"`{fmt.name}`")
    return [f"Not for caches yet: {', '.join(names[reason])} ({reason})." for reason in names]


def calibrated_bases() -> str:
    """The transformation of vectors in a calibrated format before quantization."""
    return from_docstring(bases)[1]


def preset_table() -> str:
    """The formats and the exact tokens of every preset, the bytes of its packed tokens, and their share of bfloat16."""
    rows = []
    for name, pair in (presets.PRESETS | presets.CALIBRATED_PRESETS).items():
        nbytes = get_format(pair.key).bytes_per_token() + get_format(pair.value).bytes_per_token()
        sizes = [int(nbytes.subs(HEAD_DIM, head_dim)) for head_dim in HEAD_DIMS]
        of_bf16 = [f"{size} ({100 * size / (4 * dim):.0f} %)" for size, dim in zip(sizes, HEAD_DIMS, strict=True)]
        exact = str(pair.residual_length or "")
        rows.append([f"`{name}`", f"`{pair.key}`", f"`{pair.value}`", exact, f"`{nbytes}`", *of_bf16])
    return table(["preset", "keys", "values", "exact recent tokens", "bytes of K + V", *map(str, HEAD_DIMS)], rows)


def section_table() -> str:
    """The sections of a block, for formats of each kind."""
    rows = []
    for name in (
        "int8_per_token_head",
        "int4_per_token_head",
        "int4_per_group_32",
        "turboquant_3bit",
        "transform_4321",
    ):
        packed = PackedLayout(name, "key", 128)
        for section in packed.sections:
            offset = packed.section_offsets[section.name]
            dtype = dtype_name(section.dtype)
            rows.append([f"`{name}`", f"`{section.name}`", dtype, str(section.width), str(section.nbytes), str(offset)])
        rows.append([f"`{name}`", "in all", "", "", str(packed.bytes_per_token), f"{packed.block_bytes} (next block)"])
    return table(["format", "section", "dtype", "elements a token", "bytes a token", "byte offset in a block"], rows)


def cache_size_formula() -> str:
    """Bytes of a cache's tensor, for one format."""
    packed = PackedLayout("int4_per_token_head", "key", 128)
    return f"    bytes = {packed.nbytes()}"


def packing() -> str:
    """How codes become bytes."""
    return "\n\n".join(from_docstring(bit_planes))


def block_layout() -> str:
    """The places of the bytes of a cache."""
    return from_docstring(layout)[1]


# Policy


def policy_fields() -> str:
    """Every class of a policy with its fields."""
    schema = policy_schema()
    parts = {"Policy": schema, **schema["$defs"]}
    titles = {
        "Policy": "A policy",
        "Rule": "A rule, an item of `rules`",
        "Match": "`match` of a rule",
        "Choice": "`default`",
        "RoleFormat": "`key` and `value`",
    }
    order = sorted(parts, key=lambda name: list(titles).index(name) if name in titles else len(titles))
    return "\n\n".join(_policy_class(titles.get(name, f"`{name}`"), parts[name]) for name in order)


def _policy_class(title: str, part: dict[str, Any]) -> str:
    required = part.get("required", ())
    rows = [
        [f"`{name}`", _type(field), _default(field, name in required), str(field.get("description", ""))]
        for name, field in part["properties"].items()
    ]
    return f"### {title}\n\n{part['description']}\n\n{table(['field', 'values', 'default', 'meaning'], rows)}"


def _type(field: dict[str, Any]) -> str:
    """The values of a field, in words."""
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"] if option.get("type") != "null")
    if "$ref" in field:
        return {"RoleFormat": "`{dtype: ...}`", "Choice": "`dtype`, `key`, `value`", "Match": "`layers`, `module`"}.get(
            name := field["$ref"].rpartition("/")[2], f"`{name}`"
        )
    if "enum" in field:
        names = presets.known_names()
        if set(names) - {presets.AUTO} <= set(field["enum"]):
            return "a preset, a format" + (" or `auto`" if presets.AUTO in field["enum"] else "")
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if isinstance(field.get("type"), list):
        return " or ".join(field["type"])
    if field.get("type") == "array":
        return f"list of {'rules' if field['items'].get('$ref', '').endswith('/Rule') else _type(field['items'])}"
    return {"boolean": "`true`, `false`"}.get(str(field.get("type")), str(field.get("type")))


def _default(field: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = field.get("default")
    return "" if default is None or default == [] else f"`{str(default).lower()}`"


def policy_names() -> str:
    """All valid names of a dtype."""
    singles = [name for name in FORMATS if name not in presets.PRESETS]
    lists = {
        "Presets": list(presets.PRESETS),
        "Presets that need `transforms`": list(presets.CALIBRATED_PRESETS),
        "Formats that are not presets": singles,
        "Formats that need `transforms`": list(presets.CALIBRATED_NAMES),
        "Formats of latents that serve as keys and values": list(LATENT_FORMATS),
        "No format, the cache stays unpacked": [presets.AUTO],
    }
    text = "\n".join(f"- {title}: {', '.join(f'`{name}`' for name in names)}." for title, names in lists.items())
    wrapped = [textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in text.splitlines()]
    return "\n".join([*wrapped, "", f"The environment variable is `{policy.POLICY_VARIABLE}`."])


# Refusals


def refusals() -> str:
    """Every reason, with its message and its remedy."""
    return "\n\n".join(_refusal(reason) for reason in Reason)


def _refusal(reason: Reason) -> str:
    message = re.sub(r"\{(\w+)\}", r"*\1*", reason.value)
    kind = "skipped" if reason.name in NOT_REFUSED else "refused"
    remedy = f"{reason.remedy[0].upper()}{reason.remedy[1:]}."
    return f"### `{reason.name}`\n\n{kind}: {message}\n\n{remedy}"
