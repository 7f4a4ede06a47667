"""Keys that are multiplied by factors of their token before attention: the decode kernel."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_case import Case
from calibrated_bases import based

from kvcompile.kernels import calibrated
from kvcompile.kernels.spec.key_factors import KeyFactors


@dataclasses.dataclass
class CaseWithFactors(Case):
    """A case of the kernel with random factors in the dtype of the query, which is also the dtype of their products."""

    bfloat16_tolerance: float = 1e-2

    def __post_init__(self):
        super().__post_init__()
        generator = torch.Generator().manual_seed(1)
        factors = torch.randn(2, self.kv_len, self.head_dim, generator=generator).to(self.dtype)
        half = self.head_dim // 2
        paired = torch.cat([self.query[..., half:], self.query[..., :half]], -1)
        self.factors = KeyFactors(paired, factors)

    def kernel(self, mask=None, is_causal=False, sinks=None, softcap=0.0):
        def on_device(x):
            return None if x is None else x.to(self.device)

        return calibrated.attention(
            on_device(self.query), *map(on_device, self.data), on_device(mask), on_device(sinks), self.kv_len,
            is_causal, self.scale, softcap, self.key, self.value, self.v_head_dim,
            key_factors=KeyFactors(*map(on_device, self.factors)),
        ).cpu()  # fmt: skip

    def expected(self, **kwargs):
        factors = KeyFactors(self.factors.paired.float(), self.factors.factors)
        return super().expected(key_factors=factors, **kwargs)


KERNEL_FORMATS = [
    *("int8_per_token_head", "int4_unrotated", "fp8_e4m3", "int4_per_channel[recent=1,sinks=0,bfloat16]"),
    *("turboquant_4bit", "turboquant_3bit", "int4_per_token_head", "int2_per_token_head"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("int3_unrotated", "int8_per_group_32", "bfloat16")),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("int8_per_channel[recent=1,sinks=1,float32]", "fp8_e5m2")
    ),
]


@pytest.mark.parametrize("key", KERNEL_FORMATS)
def test_the_kernel_agrees_with_the_specification(key, device):
    CaseWithFactors(device, key, "int8_per_token_head" if "channel" in key else key).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_multiplies_in_the_dtype_of_the_query(dtype, device):
    CaseWithFactors(device, "int4_unrotated", dtype=dtype, spread=3.0, key_bias=2.0).check()


@pytest.mark.parametrize(
    ("head_dim", "rows", "options"),
    [
        (80, (2, 1), {}),
        (64, (8, 2), {"mask": True}),
        (64, (1, 3), {"is_causal": True}),
        (64, (3, 1), {"softcap": 3.0, "sinks": True}),
    ],
)
def test_the_kernel_takes_any_rows_masks_and_heads(head_dim, rows, options, device):
    group_size, q_len = rows
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = torch.tensor([0.5, -1.0, 2.0])
    if "mask" in options:
        options["mask"] = torch.rand(q_len, 130) > 0.4
    case = CaseWithFactors(device, head_dim=head_dim, v_head_dim=head_dim, group_size=group_size, q_len=q_len)
    case.check(**options)


@pytest.mark.parametrize("key", ["turboquant_4bit_mean", pytest.param("int4_unrotated_mean", marks=pytest.mark.slow)])
def test_calibrated_keys_are_dequantized(key, device):
    name = based(key, num_heads=Case.num_kv_heads, head_dim=Case.head_dim).name
    CaseWithFactors(device, name).check()


@pytest.mark.parametrize("head_dim", [64, pytest.param(96, marks=pytest.mark.slow)])
def test_keys_of_a_rotated_format_are_rotated_back(head_dim, device):
    residual = "[recent=1,sinks=1,bfloat16]"
    case = CaseWithFactors(
        device, "turboquant_4bit" + residual, "turboquant_3bit" + residual, head_dim=head_dim, v_head_dim=head_dim,
        kv_len=200, q_len=2,
    )  # fmt: skip
    case.check(mask=torch.rand(2, 200) > 0.4)


def test_exact_blocks_of_the_kernel_have_the_factors_of_their_tokens(device):
    residual = "[recent=1,sinks=1,bfloat16]"
    case = CaseWithFactors(device, "int8_per_token_head" + residual, "int4_unrotated" + residual, kv_len=200)
    case.check()
