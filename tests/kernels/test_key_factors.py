"""Keys that are multiplied by factors of their token before attention: the specification."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_reference_attention import Case

from kvcompile.kernels.spec.key_factors import KeyFactors, paired_query
from kvcompile.kernels.spec.new_tokens import NewTokens
from kvcompile.kernels.spec.packing import read_tokens

FORMATS = (
    *("int8_per_token_head", "int4_unrotated", "int3_unrotated", "fp8_e4m3_unit", "int8_per_group_32", "bfloat16"),
    *("int4_per_token_head", "turboquant_3bit"),  # rotated
)
HALVES = tuple((j + 32) % 64 for j in range(64))
NEIGHBOURS = tuple(j ^ 1 for j in range(64))
PARTIAL = (*range(16), *(j ^ 1 for j in range(16, 32)), *range(48, 64), *range(32, 48))


class CaseWithFactors(Case):
    """A case with random factors; ``partners`` has the partner of each channel."""

    def __init__(self, *args, partners=HALVES, **kwargs):
        super().__init__(*args, **kwargs)
        generator = torch.Generator().manual_seed(1)
        self.partners = list(partners)
        self.of_keys = torch.randn(2, self.kv_len, self.query.shape[-1], generator=generator)
        factors = torch.stack([self.of_keys[0], self.of_keys[1][:, self.partners]])
        self.factors = KeyFactors(paired_query(self.query, tuple(partners)), factors)

    def attend(self, **kwargs):
        return super().attend(key_factors=self.factors, **kwargs)

    def expected(self, mask=None, **kwargs):
        k, v = (read_tokens(d, layout, self.kv_len).double() for d, layout in zip(self.data, self.layouts, strict=True))
        k = self.of_keys[0] * k + self.of_keys[1] * k[..., self.partners]
        return F.scaled_dot_product_attention(self.query.double(), k, v, mask, enable_gqa=True, **kwargs)


@pytest.mark.parametrize("key", FORMATS)
@pytest.mark.parametrize("q_len", [1, 40])
def test_attention_equals_sdpa_on_keys_that_were_multiplied_by_the_factors(key, q_len):
    CaseWithFactors(key, q_len=q_len).check()


@pytest.mark.parametrize("partners", [HALVES, NEIGHBOURS, PARTIAL])
def test_partners_are_any_pairs_of_channels(partners):
    case = CaseWithFactors(partners=partners)
    assert torch.equal(case.factors.paired, case.query[..., list(partners)])
    case.check(mask=(torch.arange(case.kv_len) % 3 != 0)[None])


def test_the_cache_may_be_longer_than_the_factors():
    CaseWithFactors("int4_unrotated", kv_len=70, capacity=300).check(scale=0.3)


@pytest.mark.parametrize(
    "key", ["int8_per_token_head[recent=1,sinks=1,float32]", "int4_per_channel[recent=1,sinks=0,float32]"]
)
@pytest.mark.parametrize("q_len", [1, 40])
def test_exact_blocks_have_the_factors_of_their_tokens(key, q_len):
    CaseWithFactors(key, q_len=q_len, kv_len=200).check()


def test_new_keys_are_read_packed_beside_factors():
    new = NewTokens(torch.zeros(2, 2, 1, 64), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="key_factors or new_keys, not both"):
        CaseWithFactors().attend(new_keys=new)
