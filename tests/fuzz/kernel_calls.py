"""Random calls of kernels: attention, stores and dequantizing give the results of the specification.

Most sizes of a call choose another configuration of a kernel, and a compiler may be wrong for one of them. Each call is
a dataclass, whose text is the call to repeat.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from attention_case import MASKS, Case, hide_packed_form
from read_values import assert_reads_like_the_specification, packed_cache
from stored_bytes import assert_stores_like_the_specification, vectors

from fuzz.long_run import results_until
from kvcompile.errors import one_line
from kvcompile.kernels.formats import get_format
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role

FORMATS = [
    "bfloat16", "fp8_e4m3", "fp8_e5m2_scale0.37", "fp8_e4m3_unit",
    "int8_per_token_head", "int4_per_token_head", "int2_per_token_head", "int4_unrotated", "int3_unrotated",
    "int2_unrotated", "int8_per_group_128", "int4_per_group_32", "int2_per_group_64",
    "turboquant_2bit", "turboquant_2.5bit", "turboquant_3bit", "turboquant_3.5bit", "turboquant_4bit", "uniform_42",
    "uniform_4321",
]  # fmt: skip
OF_CHANNELS = ["int8_per_channel", "int4_per_channel", "int2_per_channel"]
"""Formats with scales per channel, which are for keys with an exact newest block."""
HEAD_DIMS = [16, 32, 48, 64, 80, 96, 112, 128, 128, 128, 144, 192, 224, 256, 320, 512]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

LARGEST_ERROR = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-2}
"""Larger relative errors of attention are faults. Rounding stays below; tests of single formats are stricter."""


@dataclass(frozen=True)
class Attention:
    """Attention of random queries on random keys and values.

    Attributes:
        mask: ``none``, ``causal`` or a name in MASKS.
        num_sms: the work is divided as for a device with so many multiprocessors: with few, programs have many tiles.
    """

    key: str
    value: str
    head_dim: int
    v_head_dim: int
    dtype: str
    batch: int
    num_kv_heads: int
    group_size: int
    q_len: int
    kv_len: int
    mask: str
    sinks: bool
    softcap: float
    num_sms: int

    @classmethod
    def draw(cls, choose: random.Random, most_tokens: int) -> Attention:
        """A random call with at most ``most_tokens`` tokens and 160 query rows for a KV head."""
        head_dim = choose.choice(HEAD_DIMS)
        v_head_dim = head_dim if choose.random() < 0.8 else choose.choice(HEAD_DIMS)
        dtype = choose.choice(["bfloat16", "bfloat16", "float16", "float32"])
        key, value = _format(choose, "key", head_dim), _format(choose, "value", v_head_dim)
        group_size = choose.choice([1, 2, 3, 4, 4, 5, 7, 8, 12, 16, 32, 64])
        q_len = choose.choice([1, 1, 1, 2, 3, 4, 5, 8, 17, 33, 64, 130])
        q_len = max(1, min(q_len, 160 // group_size))
        kv_len = choose.choice([1, 2, 63, 64, 65, 127, 128, 129, choose.randint(1, most_tokens), most_tokens])
        mask = choose.choice(["none", "causal", *MASKS])
        return cls(
            key, value, head_dim, v_head_dim, dtype, choose.choice([1, 2, 3]), choose.choice([1, 2, 3]), group_size,
            q_len, kv_len, mask, choose.random() < 0.2, choose.choice([0.0, 0.0, 0.0, 5.0]),
            choose.choice([1, 2, 5, 20, 132, 132]),
        )  # fmt: skip

    def check(self, device: torch.device) -> None:
        """Raise an AssertionError if the result is wrong."""
        case = Case(
            device, self.key, self.value, self.batch, self.num_kv_heads, self.group_size, self.q_len, self.kv_len,
            self.head_dim, self.v_head_dim, DTYPES[self.dtype],
        )  # fmt: skip
        hide_packed_form(case)
        num_heads = self.num_kv_heads * self.group_size
        make = MASKS.get(self.mask)
        options = {
            "mask": None if make is None else make(self.batch, num_heads, self.q_len, self.kv_len),
            "is_causal": self.mask == "causal",
            "sinks": torch.linspace(-2, 2, num_heads) if self.sinks else None,
            "softcap": self.softcap,
        }
        with mock.patch.object(launcher, "num_sms_of", return_value=self.num_sms):
            actual = case.kernel(**options).float()
        expected = case.expected(**options)
        error = (actual - expected).norm() / expected.norm().clamp(min=1e-6)
        assert error <= LARGEST_ERROR[self.dtype], f"relative error {error:.1e}"


@dataclass(frozen=True)
class _OfOneCache:
    """A call on one cache of keys or of values."""

    format: str
    role: Role
    head_dim: int
    dtype: str
    batch: int
    num_kv_heads: int


@dataclass(frozen=True)
class Store(_OfOneCache):
    """A store of ``tokens`` vectors that begins at the token ``start`` of a cache of random bytes."""

    start: int
    tokens: int

    @classmethod
    def draw(cls, choose: random.Random, most_tokens: int) -> Store:
        cache = _cache(choose, _token_format)
        start = choose.choice([0, 1, 63, 64, 65, choose.randint(0, 200)])
        return cls(*cache, start, choose.choice([1, 2, 3, 63, 64, 65, choose.randint(1, most_tokens)]))

    def check(self, device: torch.device) -> None:
        """Raise an AssertionError if a byte is wrong."""
        layout = PackedLayout(self.format, self.role, self.head_dim)
        x = vectors(self.batch, self.num_kv_heads, self.tokens, self.head_dim, DTYPES[self.dtype])
        positions = torch.arange(self.start, self.start + self.tokens)
        capacity = self.start + self.tokens + 3
        assert_stores_like_the_specification(layout, x, positions, device=device, capacity=capacity)


@dataclass(frozen=True)
class Read(_OfOneCache):
    """The first ``tokens`` tokens of a cache, dequantized."""

    tokens: int

    @classmethod
    def draw(cls, choose: random.Random, most_tokens: int) -> Read:
        return cls(*_cache(choose, _format), choose.choice([1, 63, 64, 65, choose.randint(1, most_tokens)]))

    def check(self, device: torch.device) -> None:
        """Raise an AssertionError if a value is wrong."""
        layout, data = packed_cache(
            self.format, self.head_dim, self.tokens, self.tokens + 5, self.role, self.batch, self.num_kv_heads
        )
        assert_reads_like_the_specification(layout, data, self.tokens, DTYPES[self.dtype], device)


Call = Attention | Store | Read


def _cache(choose: random.Random, format_of: Callable[[random.Random, Role, int], str]) -> tuple[Any, ...]:
    """The fields of :class:`_OfOneCache`."""
    role: Role = choose.choice(["key", "value"])
    head_dim = choose.choice(HEAD_DIMS)
    name, dtype = format_of(choose, role, head_dim), choose.choice(list(DTYPES))
    return name, role, head_dim, dtype, choose.choice([1, 2, 3]), choose.choice([1, 2, 3])


def _token_format(choose: random.Random, role: Role, head_dim: int) -> str:
    """A format with scales per token or group that supports ``head_dim``."""
    fitting = [name for name in FORMATS if get_format(name).unsupported(head_dim, role) is None]
    return choose.choice(fitting)


def _format(choose: random.Random, role: Role, head_dim: int) -> str:
    """The text of a layout: a format, and perhaps exact blocks."""
    if role == "key" and choose.random() < 0.25:
        fitting = [name for name in OF_CHANNELS if get_format(name).unsupported(head_dim, role) is None]
        return f"{choose.choice(fitting)}[recent={choose.choice([1, 2])},sinks={choose.choice([0, 1])},bfloat16]"
    name = _token_format(choose, role, head_dim)
    if name == "bfloat16" or choose.random() < 0.6:
        return name
    recent, sinks = choose.choice([(1, 0), (0, 1), (2, 1), (3, 2)])
    return f"{name}[recent={recent},sinks={sinks},{choose.choice(['bfloat16', 'float16'])}]"


def call_of(seed: int, most_tokens: int = 450) -> Call:
    """The random call of a seed."""
    choose = random.Random(seed)
    kind: Callable[[random.Random, int], Call] = choose.choice([Attention.draw] * 4 + [Store.draw, Read.draw])
    return kind(choose, most_tokens)


def fault_of(seed: int, device: str, most_tokens: int) -> str:
    """Run the call of a seed. Returns a line about its fault, or an empty text without one.

    After an illegal memory access all calls of a process would fail. Other errors than wrong results therefore end the
    process on a GPU.
    """
    call = call_of(seed, most_tokens)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        call.check(torch.device(device))
    except Exception as error:
        line = f"{call}.check(torch.device({device!r}))  # {type(error).__name__}: {one_line(error)}"
        if device == "cuda" and not isinstance(error, AssertionError):
            print(line, flush=True)
            os._exit(1)
        return line
    return ""


def search_until(end: float, first_seed: int, processes: int, device: str, prepare: Callable[[], None]) -> int:
    """Run calls until the time ``end``, and print every fault. Returns the number of faults.

    On a CPU kernels run in Triton's interpreter, with fewer tokens. Each process begins with ``prepare``.
    """
    task = functools.partial(fault_of, device=device, most_tokens=1500 if device == "cuda" else 140)
    calls = faults = 0
    for _, fault in results_until(end, first_seed, task, processes, prepare):
        calls += 1
        faults += fault != ""  # None if the process died
        if fault:
            print(fault, flush=True)
    print(f"{calls} calls of kernels, {faults} faults", flush=True)
    return faults
