"""A case of attention on packed caches for the tests of kernels, and masks."""

from __future__ import annotations

import dataclasses

import torch

from kvcompile.kernels import launch
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.packing import write_tokens_
from kvcompile.kernels.spec.residual import holding_entries

INT8 = "int8_per_token_head"
ONE, SINK, BOTH = "[recent=1,sinks=0,bfloat16]", "[recent=0,sinks=1,bfloat16]", "[recent=2,sinks=1,bfloat16]"
NAN_BYTES = 0xFF  # NaN as fp32, fp16 and e4m3


@dataclasses.dataclass
class Case:
    """Random queries, keys and values, packed in a buffer that is full of NaN elsewhere.

    A case is small, because an interpreted kernel takes milliseconds for every operation of every program.

    Attributes:
        spread: standard deviation of keys and values.
        key_bias: mean of every eighth key channel.
        bfloat16_tolerance: largest relative error with queries in bfloat16.
    """

    device: torch.device
    key: str = INT8
    value: str = INT8
    batch: int = 1
    num_kv_heads: int = 1
    group_size: int = 2
    q_len: int = 1
    kv_len: int = 130
    head_dim: int = 64
    v_head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    spread: float = 1.0
    key_bias: float = 0.0
    scale: float = 0.2
    bfloat16_tolerance: float = 5e-3

    def __post_init__(self):
        generator = torch.Generator().manual_seed(0)
        num_heads = self.num_kv_heads * self.group_size
        self.query = torch.randn(self.batch, num_heads, self.q_len, self.head_dim, generator=generator).to(self.dtype)
        self.layouts = (
            PackedLayout.parse(self.key, "key", self.head_dim),
            PackedLayout.parse(self.value, "value", self.v_head_dim),
        )
        self.data = []
        for layout in self.layouts:
            x = torch.randn(self.batch, self.num_kv_heads, self.kv_len, layout.head_dim, generator=generator)
            if layout.role == "key":
                x[..., ::8] += self.key_bias
            shape = layout.shape(self.kv_len + 64, self.batch, self.num_kv_heads)
            data = torch.full(shape, NAN_BYTES, dtype=torch.uint8)
            write_tokens_(data, layout, x * self.spread, torch.arange(self.kv_len))
            self.data.append(data)

    def kernel(self, mask=None, is_causal=False, sinks=None, softcap=0.0):
        mask, sinks = (None if tensor is None else tensor.to(self.device) for tensor in (mask, sinks))
        return launch.attention(
            self.query.to(self.device), *[data.to(self.device) for data in self.data], mask, sinks,
            self.kv_len, is_causal, self.scale, softcap, self.key, self.value, self.v_head_dim,
        ).cpu()  # fmt: skip

    def expected(self, **kwargs):
        return attend(self.query.float(), *self.data, *self.layouts, kv_len=self.kv_len, scale=self.scale, **kwargs)

    def check(self, mask=None, **kwargs):
        out, expected = self.kernel(mask, **kwargs), self.expected(mask=mask, **kwargs)
        assert out.is_contiguous()
        assert out.dtype == self.dtype
        relative_error = (out.float() - expected).norm() / expected.norm()
        tolerance = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: self.bfloat16_tolerance}[self.dtype]
        if any(layout.format_name == "bfloat16" for layout in self.layouts):
            tolerance = max(tolerance, 5e-3)  # products of bfloat16
        assert relative_error < tolerance


MASKS = {
    "a prefix": lambda b, h, q, n: (torch.arange(n) < n // 2).expand(b, 1, 1, n),
    "a range of each sequence": lambda b, h, q, n: (
        (torch.arange(n) >= torch.arange(b)[:, None] * 70) & (torch.arange(n) < n - 5)
    ).reshape(b, 1, 1, n),
    "holes": lambda b, h, q, n: (torch.arange(n) % 3 > 0).expand(1, 1, 1, n),
    "one key": lambda b, h, q, n: (torch.arange(n) == n - 1).expand(b, 1, 1, n),
    "causal, aligned to the end": lambda b, h, q, n: torch.ones(q, n, dtype=torch.bool).tril(n - q).expand(b, 1, q, n),
    "different heads": lambda b, h, q, n: torch.arange(b * h * q * n).reshape(b, h, q, n) % 5 > 0,
    "float, for all rows": lambda b, h, q, n: torch.sin(torch.arange(float(n))).expand(b, 1, 1, n),
    "float, different rows": lambda b, h, q, n: torch.sin(torch.arange(float(b * h * q * n))).reshape(b, h, q, n),
    "float, half of it -inf": lambda b, h, q, n: torch.zeros(n).index_fill(0, torch.arange(n // 2), -torch.inf),
    "float, half of it as small as floats get": lambda b, h, q, n: (
        torch.zeros(n).index_fill(0, torch.arange(n // 2), torch.finfo(torch.float32).min).expand(1, 1, q, n)
    ),
    "float in 16 bits": lambda b, h, q, n: torch.cos(torch.arange(float(n))).bfloat16().expand(b, 1, 1, n),
}


def hide_packed_form(case: Case) -> None:
    """Write random codes to the packed form of all exact blocks, which nothing may read."""
    generator = torch.Generator().manual_seed(5)
    for layout, data in zip(case.layouts, case.data, strict=True):
        if layout.residual is not None:
            codes = layout.split(data)["codes"]
            _, exact = holding_entries(data, layout)
            noise = torch.randint(0, 256, codes.shape, generator=generator).to(codes.dtype)
            codes.copy_(torch.where(exact[..., None, None], noise, codes))
