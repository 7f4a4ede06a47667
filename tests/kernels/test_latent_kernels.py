"""The kernels for caches that serve as keys and values agree with the specification."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from attention_case import BOTH, MASKS, NAN_BYTES, hide_packed_form
from formats_of_every_kind import BY_TOKEN, in_turn

from kvcompile.kernels import launch
from kvcompile.kernels.attention import launch_prefill
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.latent import launch as launch_latent
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.layout.references import References
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.packing import write_tokens_

LATENTS = PackedLayout("fp8_ds_mla", "key", 512)

# NumPy warns when the interpreter multiplies numbers that are not finite.
pytestmark = [
    pytest.mark.usefixtures("poisoned_outputs"),
    pytest.mark.filterwarnings("ignore:.* encountered in multiply:RuntimeWarning"),
]


@dataclasses.dataclass
class Case:
    """Random queries and latents, packed in a buffer that is full of NaN elsewhere."""

    device: torch.device
    spec: str = "fp8_ds_mla"
    batch: int = 1
    num_heads: int = 4
    q_len: int = 1
    kv_len: int = 130
    head_dim: int = 512
    dtype: torch.dtype = torch.bfloat16
    scale: float = 0.08

    def __post_init__(self):
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(self.batch, self.num_heads, self.q_len, self.head_dim, generator=generator)
        self.query = query.to(self.dtype)
        self.layout = PackedLayout.parse(self.spec, "key", self.head_dim)
        self.data = torch.full(self.layout.shape(self.kv_len + 64, self.batch, 1), NAN_BYTES, dtype=torch.uint8)
        x = torch.randn(self.batch, 1, self.kv_len, self.head_dim, generator=generator)
        write_tokens_(self.data, self.layout, x, torch.arange(self.kv_len))

    def kernel(self, mask=None, is_causal=False, sinks=None, softcap=0.0, data=None):
        mask, sinks = (None if tensor is None else tensor.to(self.device) for tensor in (mask, sinks))
        return launch.attention(
            self.query.to(self.device), self.data.to(self.device) if data is None else data, None, mask, sinks,
            self.kv_len, is_causal, self.scale, softcap, self.spec, self.spec, self.head_dim,
        ).cpu()  # fmt: skip

    def expected(self, **kwargs):
        layouts = self.layout, self.layout
        return attend(
            self.query.float(), self.data, self.data, *layouts, kv_len=self.kv_len, scale=self.scale, **kwargs
        )

    def check(self, mask=None, **kwargs):
        out, expected = self.kernel(mask, **kwargs), self.expected(mask=mask, **kwargs)
        assert out.is_contiguous()
        assert out.dtype == self.dtype
        tolerance = 1e-4 if self.dtype == torch.float32 else 1e-2
        assert (out.float() - expected).norm() < tolerance * expected.norm()


@pytest.fixture(params=["as configured", pytest.param("portable", marks=pytest.mark.gpu)])
def kernel(request, device, monkeypatch):
    """The kernel that is configured for the device; on Hopper also the portable kernel."""
    if request.param == "portable":
        if launcher.capability_of(device) != 9:
            pytest.skip("the portable kernel is the one that is configured")
        monkeypatch.setattr(launch_latent, "launch_hopper_latent_attention", None)


BOTH_KERNELS = pytest.mark.usefixtures("kernel")
MORE_HEADS = [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((64, 1), (128, 1), (64, 3), (128, 17))]


@BOTH_KERNELS
@pytest.mark.parametrize(("num_heads", "q_len"), [(1, 1), (3, 17), (16, 1), (16, 3), (17, 1), (65, 1), *MORE_HEADS])
def test_attention_to_latents_agrees_with_the_specification(num_heads, q_len, device):
    Case(device, num_heads=num_heads, q_len=q_len, kv_len=70).check()


@pytest.mark.parametrize(("num_heads", "dtype"), in_turn([5, 17], [torch.float16, torch.float32]))
def test_queries_of_latents_may_be_of_any_float_dtype(num_heads, dtype, device):
    Case(device, batch=2, num_heads=num_heads, dtype=dtype, kv_len=70).check()


@BOTH_KERNELS
@pytest.mark.parametrize("kv_len", [1, 31, 32, 33, 63, 64, 65, 129, pytest.param(600, marks=pytest.mark.slow)])
def test_every_length_of_a_cache_of_latents_agrees_and_nothing_beyond_it_is_seen(kv_len, device):
    Case(device, kv_len=kv_len).check()


@BOTH_KERNELS
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_latents_agree_with_the_specification(mask, device):
    case = Case(device, batch=2, num_heads=5, q_len=3, kv_len=70)
    case.check(MASKS[mask](case.batch, 5, 3, case.kv_len))


@BOTH_KERNELS
def test_splits_of_latents_whose_scores_are_all_far_below_zero_are_merged_by_their_sums(device, monkeypatch):
    """The last split has 5 tokens, the others have 64. Near -1e9, all log-sums round to the same number."""
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 64)
    case = Case(device, kv_len=325, scale=1e-4)
    case.check(torch.full((1, 1, 1, case.kv_len), -1e9))


@BOTH_KERNELS
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 70), (17, 17), (25, 70), (40, 33)])
def test_a_causal_query_sees_the_latents_up_to_its_own_position(q_len, kv_len, device):
    Case(device, num_heads=3, q_len=q_len, kv_len=kv_len).check(is_causal=True)


@pytest.mark.parametrize("hidden", [torch.tensor(False), torch.tensor(-torch.inf)])
def test_a_query_that_sees_no_latent_gets_zeros(hidden, device):
    case = Case(device, batch=2, q_len=2)
    mask = hidden.expand(2, 1, 2, case.kv_len).clone()
    mask[1, :, 1] = 1
    out = case.kernel(mask)
    assert out[0].eq(0).all()
    assert out[1, :, 0].eq(0).all()
    torch.testing.assert_close(out.float(), case.expected(mask=mask), rtol=2e-2, atol=2e-2)
    case.kv_len = 0
    assert case.kernel().eq(0).all()


@BOTH_KERNELS
def test_sinks_and_softcap_agree_with_the_specification(device):
    case = Case(device, q_len=3)
    case.check(sinks=torch.tensor([0.5, -20.0, 8.0, float("-inf")]), softcap=5.0)
    case.check(torch.arange(case.kv_len) > 99, sinks=torch.zeros(4, dtype=torch.bfloat16))


@BOTH_KERNELS
@pytest.mark.parametrize("num_sms", [1, 3, 64])
def test_the_number_of_splits_of_latents_does_not_matter(num_sms, device, monkeypatch):
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: num_sms)
    case = Case(device, kv_len=150)
    case.check()
    case.check((torch.arange(case.kv_len) >= 50) & (torch.arange(case.kv_len) < 130))


def test_latents_and_queries_may_have_any_strides(device):
    case = Case(device, batch=2)
    expected = case.kernel()
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([case.data, case.data], 1).to(device)[:, : case.batch]
    assert torch.equal(case.kernel(data=wide), expected)


@BOTH_KERNELS
def test_a_latent_that_is_not_finite_spoils_its_own_sequence_only(device):
    case = Case(device, batch=2, kv_len=70)
    x = torch.zeros(2, 1, 1, 512)
    x[1, ..., 70] = torch.nan
    write_tokens_(case.data, case.layout, x, torch.tensor([17]))
    out = case.kernel()
    assert out[1].isnan().any()
    assert not out[0].isnan().any()


@BOTH_KERNELS
def test_every_code_and_every_scale_of_a_latent_is_dequantized_exactly(device):
    """Attention to a single token returns its latent. All codes and many scales occur."""
    case = Case(device, batch=18, kv_len=1, num_heads=3)
    codes, scales = case.data[0, :, 0, :448], case.data[0, :, 0, 64 * 576 : 64 * 576 + 7]
    codes[:] = (torch.arange(448) + 64 * torch.arange(18)[:, None]).remainder(256).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scales[:] = torch.arange(18 * 7).view(18, 7) * 2 % 247  # up to the largest scale with which 448 is finite
    case.query[:] = 0
    codes[16, 70], scales[17, 3] = 0xFF, 255
    out, expected = case.kernel().float(), case.expected()
    torch.testing.assert_close(out[:16], expected[:16], rtol=0, atol=2e-38)  # subnormal numbers may be zeros
    for sequence in (16, 17):
        assert expected[sequence].isnan().any()
        assert out[sequence].isnan().any()


# Storing


def hard_latents(*shape, dtype=torch.float32):
    """Vectors with magnitudes of every kind, some of them not finite."""
    x = torch.randn(*shape, 512, generator=torch.Generator().manual_seed(0))
    x[..., ::9, :] *= 1e3
    x[..., 1::9, 70] = 3e4
    x[..., 2::9, :] *= 1e-7
    x[..., 3::9, :] = 0.0
    x[..., 5::9, 100] = torch.nan
    x[..., 6::9, 447] = -torch.inf
    x[..., 7::9, 511] = torch.inf
    return x.to(dtype)


def assert_stores_like_the_specification(x, positions, valid=None, *, device, capacity, restride=lambda x: x):
    """Write over arbitrary bytes with the kernel and with the specification, and compare every byte of the buffer."""
    generator = torch.Generator().manual_seed(1)
    shape = LATENTS.shape(capacity, *x.shape[:2])
    expected = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    data = expected.to(device, copy=True)
    write_tokens_(expected, LATENTS, x, positions, valid)
    valid = None if valid is None else valid.to(device)
    launch.store(data, restride(x.to(device)), positions.to(device), valid, "fp8_ds_mla", "key")
    assert torch.equal(data.cpu(), expected)


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), in_turn([1, 3, 17, 70], [torch.bfloat16, torch.float16, torch.float32])
)
def test_stored_latents_equal_the_specification(num_tokens, dtype, device):
    x, positions = hard_latents(2, 1, num_tokens, dtype=dtype), torch.arange(60, 60 + num_tokens)
    assert_stores_like_the_specification(x, positions, device=device, capacity=130)


def test_latents_are_stored_at_the_positions_of_each_sequence_and_invalid_ones_are_not_stored(device):
    generator = torch.Generator().manual_seed(2)
    positions = torch.stack([torch.randperm(150, generator=generator)[:40] for _ in range(2)])
    valid = torch.rand(2, 40, generator=generator) > 0.3
    x = hard_latents(2, 1, 40)
    assert_stores_like_the_specification(x, positions, valid, device=device, capacity=150)
    assert_stores_like_the_specification(x, positions[:1], valid[0], device=device, capacity=150)


def test_latents_are_stored_beside_values_of_another_attention(device):
    generator = torch.Generator().manual_seed(3)
    x, value, positions = hard_latents(2, 1, 5), torch.randn(2, 1, 5, 64, generator=generator), torch.arange(62, 67)
    layouts = LATENTS, PackedLayout("int8_per_token_head", "value", 64)
    expected = [torch.zeros(layout.shape(70, 2, 1), dtype=torch.uint8) for layout in layouts]
    data = [tensor.to(device, copy=True) for tensor in expected]
    for tensor, layout, vectors in zip(expected, layouts, (x, value), strict=True):
        write_tokens_(tensor, layout, vectors, positions)
    specs = [layout.spec for layout in layouts]
    launch.store_pair(*data, x.to(device), value.to(device), positions.to(device), None, *specs)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(data, expected, strict=True))


@pytest.mark.parametrize(
    "restride",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # [batch, tokens, heads, head_dim] in memory
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),  # channels far apart
        lambda x: torch.cat([x, x], -1)[..., :512],  # part of a fused projection
    ],
)
def test_stored_latents_may_have_any_strides(restride, device):
    x, positions = hard_latents(2, 1, 5, dtype=torch.bfloat16), torch.arange(5)
    assert_stores_like_the_specification(x, positions, device=device, capacity=64, restride=restride)


def test_references_to_latents_stand_for_them(device):
    x = hard_latents(2, 1, 100)[..., :5, :]
    data = [torch.zeros(LATENTS.shape(70, 2, 1), dtype=torch.uint8, device=device) for _ in range(2)]
    references = References(1, device)
    for tensor in (data[0], *references.refer([data[1]])):
        launch.store(tensor, x.to(device), torch.arange(5, device=device), None, "fp8_ds_mla", "key")
    assert torch.equal(*data)
    case = Case(device, batch=2)
    case.kv_len = 4
    assert torch.equal(case.kernel(data=data[0]), case.kernel(data=references.refer([data[1]])[0]))


def test_a_residual_is_refused(device):
    spec = "fp8_ds_mla[recent=1,sinks=0,bfloat16]"
    with pytest.raises(ValueError, match="a cache of latents cannot have a residual; use fp8_ds_mla"):
        Case(device, spec).kernel()


# One tensor for keys and values in other formats

RESIDUALS = ["int4_unrotated" + BOTH, "turboquant_2.5bit" + BOTH]


@pytest.mark.parametrize(
    ("spec", "prefill_rows"), [*in_turn([*BY_TOKEN, *RESIDUALS], [1, 10**9]), ("int4_per_group_32", 10**9)]
)
def test_one_tensor_serves_as_keys_and_values_in_every_format(spec, prefill_rows, device, monkeypatch):
    monkeypatch.setattr(launch_prefill, "PREFILL_ROWS", prefill_rows)
    case = Case(device, spec, num_heads=6, head_dim=64, kv_len=150, scale=0.2)
    hide_packed_form(SimpleNamespace(layouts=[case.layout], data=[case.data]))
    case.check()


@pytest.mark.parametrize(
    ("mask", "spec"),
    in_turn(
        ["causal, aligned to the end", "holes", "float, different rows"], ["int8_per_token_head", "int3_unrotated"]
    ),
)
def test_masks_of_one_tensor_agree_with_the_specification(spec, mask, device):
    case = Case(device, spec, num_heads=6, q_len=3, head_dim=80, kv_len=150, scale=0.2)
    case.check(MASKS[mask](case.batch, 6, 3, case.kv_len))


@pytest.mark.gpu
def test_offsets_of_latents_beyond_two_gigabytes_are_right():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = Case(torch.device("cuda"), num_heads=16)
    plain = case.kernel()
    wide = torch.full((case.data.shape[0], 20_000, 1, case.data.shape[3]), NAN_BYTES, dtype=torch.uint8, device="cuda")
    assert wide.numel() > 2**31
    data = wide[:, -1:]
    x, positions = torch.randn(1, 1, 3, 512, device="cuda"), torch.arange(60, 63, device="cuda")
    data.copy_(case.data)
    assert torch.equal(case.kernel(data=data), plain)
    launch.store(data, x, positions, None, "fp8_ds_mla", "key")
    write_tokens_(case.data, case.layout, x.cpu(), positions.cpu())
    assert torch.equal(data.cpu(), case.data)
