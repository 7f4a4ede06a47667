"""An interpreter of the few PTX instructions in codecs, which tests their text without a GPU."""

from __future__ import annotations

import re

import numpy as np


def run(text: str, num_outputs: int, *inputs: int) -> list[int]:
    """Run PTX text; returns the 32-bit registers ``$0`` to ``$num_outputs - 1``. The inputs are the next registers."""
    registers = {f"${num_outputs + i}": value for i, value in enumerate(inputs)}
    registers["%lanemask_ge"] = 0xFFFFFFE0  # of lane 5
    for statement in text.strip().strip("{}").split(";"):
        name, _, operands = statement.strip().partition(" ")
        if name and name != ".reg":
            output, *sources = (operand.strip() for operand in operands.split(","))
            values = [registers[s] if s in registers else _literal(s) for s in sources]
            registers[output] = _INSTRUCTIONS[re.sub(r"\.(u32|b32)$", "", name)](*values) & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(num_outputs)]


def _literal(text: str) -> int:
    return int(text[2:], 16) if text.startswith("0f") else int(text, 0)


def _prmt(a: int, b: int, selectors: int) -> int:
    choices = (b << 32 | a).to_bytes(8, "little")
    result = []
    for i in range(4):
        selector = selectors >> 4 * i & 15
        byte = choices[selector & 7]
        result.append((0xFF if byte & 0x80 else 0) if selector & 8 else byte)
    return int.from_bytes(result, "little")


def _lop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))


def _halves(operation):
    def apply(*words: int) -> int:
        pairs = [np.array([word], np.uint32).view(np.float16).astype(np.float32) for word in words]
        return int(operation(*pairs).astype(np.float16).view(np.uint32)[0])

    return apply


def _fma(*words: int) -> int:
    a, b, c = (float(np.array([word], np.uint32).view(np.float32)[0]) for word in words)
    return int(np.array([a * b + c], np.float32).view(np.uint32)[0])  # the sum is rounded twice, which is close enough


def _to_halves(high: int, low: int) -> int:
    return int(np.array([low, high], np.uint32).view(np.float32).astype(np.float16).view(np.uint32)[0])


def _dot_of_bytes(a: int, b: int, c: int) -> int:
    return c + sum((a >> shift & 0xFF) * (b >> shift & 0xFF) for shift in range(0, 32, 8))


_INSTRUCTIONS = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, n: a << n,
    "shr": lambda a, n: a >> n,
    "mul.lo": lambda a, b: a * b,
    "prmt": _prmt,
    "lop3": _lop3,
    "shf.r.wrap": lambda a, b, n: (b << 32 | a) >> (n & 31),
    "add.rn.f16x2": _halves(lambda a, b: a + b),
    "set.gt.f16x2.f16x2": _halves(lambda a, b: (a > b) * 1.0),
    "fma.rn.f32": _fma,
    "cvt.rn.f16x2.f32": _to_halves,
    "dp4a.u32": _dot_of_bytes,
    "fma.rn.f16x2": _halves(lambda a, b, c: a * b + c),
}
