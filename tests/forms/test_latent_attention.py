"""Latents that serve as keys and values are packed as one cache, which may be a page of DeepSeek-V4's K cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor, nn

from kvcompile import last_report
from kvcompile.kernels.formats import ds_mla_rows as deepseek_v4
from kvcompile.kernels.formats import get_format
from kvcompile.kernels.formats.base import HEAD_DIM
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.spec.packing import pack_tokens
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.prove.formats import _check_shared
from kvcompile.passes.refusal import Refusal

WIDTH, NUM_HEADS, MAX_LEN, BATCH = deepseek_v4.HEAD_DIM, 4, 150, 2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [B, H, T, WIDTH], latents [B, 1, S, WIDTH], mask [T, S]) -> [B, H, T, channels]."""


def grouped(q: Tensor, latents: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, latents, latents, attn_mask=mask, enable_gqa=True, scale=0.05)


def without_rotary_part(q: Tensor, latents: Tensor, mask: Tensor) -> Tensor:
    values = latents[..., : deepseek_v4.NOPE_DIM]
    return F.scaled_dot_product_attention(q, latents, values, attn_mask=mask, enable_gqa=True, scale=0.05)


def written_out(q: Tensor, latents: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, latents.transpose(2, 3)) * 0.05
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), latents)


class LatentDecoder(nn.Module):
    """A language model of one layer of latent attention in absorbed form; its cache is one buffer."""

    def __init__(self, attend: Attend, width: int = WIDTH) -> None:
        super().__init__()
        self.attend = attend
        self.embedding = nn.Embedding(97, 64)
        self.query = nn.Linear(64, NUM_HEADS * width)
        self.latent = nn.Linear(64, width)
        self.output = nn.LazyLinear(97)
        self.register_buffer("latents", torch.zeros(BATCH, 1, MAX_LEN, width))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(ids)
        q = self.query(x).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
        self.latents[:, :, positions] = self.latent(x)[:, None]
        mask = torch.arange(MAX_LEN, device=ids.device) <= positions[:, None]
        return self.output(self.attend(q, self.latents, mask).transpose(1, 2).flatten(2))


def decoder(attend: Attend, width: int = WIDTH) -> LatentDecoder:
    torch.manual_seed(0)
    model = LatentDecoder(attend, width).eval()
    with torch.no_grad():
        model(torch.zeros(BATCH, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        model.latents.zero_()
    return model


PREFILL, DECODE = (70,), (70, 1, 1, 1, 1)
"""The numbers of tokens of each step. The first decode step takes another graph."""


def run(model: Any, lengths: tuple[int, ...] = DECODE) -> Tensor:
    """Logits of all steps."""
    device, num_tokens = model.latents.device, sum(lengths)
    ids = torch.randint(0, 97, (BATCH, num_tokens), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        steps = zip(ids.split(lengths, 1), torch.arange(num_tokens, device=device).split(lengths), strict=True)
        return torch.cat([model(chunk, positions).float() for chunk, positions in steps], 1)


def compiled(model: nn.Module, policy: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(
        model, backend="kvquant", options={"policy": reading_packed(policy), "on_unsupported": "error", **options}
    )


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()


def check(
    model: LatentDecoder,
    policy: str,
    rtol: float,
    loss: float = 0.05,
    lengths: tuple[int, ...] = DECODE,
    **options: Any,
) -> None:
    """The compiled model equals eager mode on a packed cache within a relative error of ``rtol``.

    It equals the plain model within ``loss``.
    """
    width = model.latents.shape[-1]
    plain, eager = copy.deepcopy(model), copy.deepcopy(model)
    eager.latents = PackedTensor.from_dense(eager.latents, PackedLayout(policy, "key", width))
    logits = run(compiled(model, policy, **options), lengths)
    expected, exact = run(eager, lengths), run(plain, lengths)
    assert (logits - expected).norm() < rtol * expected.norm()
    assert 0 < (logits - exact).norm() < loss * exact.norm()
    assert isinstance(model.latents, PackedTensor)
    assert model.latents.format_name == policy
    (site,) = last_report().sites
    nbytes = get_format(policy).bytes_per_token().subs(HEAD_DIM, width)
    assert [(cache.role, cache.bytes_per_token_after) for cache in site.caches] == [("key", nbytes)]


@pytest.mark.usefixtures("without_code_generation", "operators_traced")
@pytest.mark.parametrize(
    ("attend", "lengths"), [(grouped, DECODE), (without_rotary_part, PREFILL), (written_out, PREFILL)]
)
def test_one_cache_of_latents_is_packed_and_read_as_keys_and_values(attend: Attend, lengths: tuple[int, ...]) -> None:
    check(decoder(attend), "fp8_ds_mla", rtol=1e-5, lengths=lengths)


@pytest.mark.usefixtures("without_code_generation")
def test_operators_take_latents_that_are_keys_and_values_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompile.passes.rewrite.insert._uses_kernels", lambda data: True)
    check(decoder(without_rotary_part), "fp8_ds_mla", rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("attend", [grouped, without_rotary_part, written_out])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_latents_on_a_gpu_are_packed_and_read_by_kernels(attend: Attend, dtype: torch.dtype, rtol: float) -> None:
    check(decoder(attend).to("cuda", dtype), "fp8_ds_mla", rtol)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("policy", "loss"), [("int8_per_token_head", 0.05), ("fp8_e4m3", 0.05), ("int4_per_token_head", 0.3)]
)
def test_one_tensor_of_keys_and_values_on_a_gpu_may_have_other_formats(policy: str, loss: float) -> None:
    check(decoder(grouped, 128).to("cuda", torch.bfloat16), policy, 1e-2, loss)


@pytest.mark.gpu
def test_steps_on_latents_are_replayed_by_cuda_graphs() -> None:
    torch._dynamo.utils.counters.clear()
    check(decoder(grouped).to("cuda", torch.bfloat16), "fp8_ds_mla", 1e-2, **{"triton.cudagraphs": True})
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.usefixtures("without_code_generation")
def test_a_growing_cache_of_latents_is_packed_too() -> None:
    def step(q: Tensor, past: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        past = torch.cat([past, new], dim=2)
        return grouped(q, past, torch.ones(1, past.shape[2], dtype=torch.bool)), past

    fmt, x = get_format("fp8_ds_mla"), torch.randn(BATCH, 1, 68, WIDTH, generator=torch.Generator().manual_seed(0))
    q, cache = x[:, :, :NUM_HEADS].transpose(1, 2), x[:, :, :66]
    fn = compiled(step, "fp8_ds_mla")
    for end in (67, 68):
        with torch.no_grad():
            out, cache = fn(q, cache, x[:, :, end - 1 : end])
        assert isinstance(cache, PackedTensor)
        stored = fmt.decode(fmt.encode(x[:, :, :end]))
        assert torch.equal(cache.dequantize(), stored)
        expected = grouped(q, stored, torch.ones(1, end, dtype=torch.bool))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_generated_code_does_the_same() -> None:
    check(decoder(without_rotary_part), "fp8_ds_mla", rtol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_and_eager_bytes_are_equal() -> None:
    fmt, x = get_format("fp8_ds_mla"), latents(20)
    x[7, 100], x[8, 500] = torch.nan, torch.inf  # NaN in the last channels may have any bits
    for name, part in torch.compile(fmt.encode)(x).items():
        assert torch.equal(part, fmt.encode(x)[name]), name


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("policy", ["int8_per_token_head", "turboquant_4bit_seed7"])
def test_narrower_latents_may_have_any_format_without_scales_per_channel(policy: str) -> None:
    if "seed" in policy:
        model = decoder(grouped, 128)
        run(compiled(model, {"default": {"dtype": "turboquant_4bit", "rotation_seed": 7}}), PREFILL)
        assert model.latents.format_name == policy
    else:
        check(decoder(grouped, 128), policy, rtol=1e-5)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    ("policy", "width", "reason"),
    [
        ("turboquant_4bit_nc", 128, "the policy gives it two formats, turboquant_4bit and int4_unrotated"),
        ("fp8_ds_mla", 128, "fp8_ds_mla: head_dim 128 is not 512"),
        ("turboquant_4bit", 320, "head_dim 320 is not a multiple of 16 between 16 and 256, nor 512"),
    ],
)
def test_caches_that_cannot_serve_as_both_are_refused(policy: str, width: int, reason: str) -> None:
    model = decoder(grouped, width)
    logits = run(compiled(model, policy, on_unsupported="ignore"), PREFILL)
    assert reason in str(last_report().sites[0].reason)
    assert not isinstance(model.latents, PackedTensor)
    torch.testing.assert_close(logits, run(decoder(grouped, width), PREFILL), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("without_code_generation")
def test_a_tensor_that_another_attention_reads_as_values_is_skipped() -> None:
    def both(q: Tensor, latents: Tensor, mask: Tensor) -> Tensor:
        other = F.scaled_dot_product_attention(q, self_keys, latents, attn_mask=mask, enable_gqa=True)
        return other + grouped(q, latents, mask)

    self_keys = torch.randn(BATCH, 1, MAX_LEN, 128)
    model = decoder(both, 128)
    run(compiled(model, "int8_per_token_head", on_unsupported="ignore"), PREFILL)
    assert not isinstance(model.latents, PackedTensor)
    assert not any(site.rewritten for site in last_report().sites)


@pytest.mark.parametrize(("spec", "shared"), [("fp8_ds_mla", False), ("fp8_ds_mla[recent=1,sinks=0,float32]", True)])
def test_formats_without_a_kernel_stay_plain_on_a_gpu(spec: str, shared: bool) -> None:
    value = SimpleNamespace(device=torch.device("cuda"))
    root = SimpleNamespace(meta={"val": value})
    cache: Any = SimpleNamespace(root=root, serves_both=shared, is_pool=False, computing=set())
    with pytest.raises(
        Refusal, match="on a GPU it is for latents that serve as keys and values, without tokens in full precision"
    ):
        _check_shared(cache, PackedLayout.parse(spec, "key", WIDTH))


def test_a_cache_packed_with_scales_per_key_channel_does_not_serve_as_values() -> None:
    root = SimpleNamespace(meta={"val": torch.zeros(1)})
    cache: Any = SimpleNamespace(root=root, serves_both=True, is_pool=False, computing=set())
    with pytest.raises(Refusal, match="the scales of int4_per_channel belong to channels of keys"):
        _check_shared(cache, PackedLayout.parse("int4_per_channel[recent=1,sinks=0,float32]", "key", 128))


# the format


def latents(*shape: int) -> Tensor:
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(0))
    x[..., ::9, :] *= 1e3
    x[..., 1::9, 70] = 3e4
    x[..., 2::9, :] *= 1e-7
    x[..., 3::9, :] = 0.0
    return x


def test_a_block_is_a_page_of_deepseek_v4s_cache() -> None:
    x = latents(BATCH, 1, 130)
    layout = PackedLayout("fp8_ds_mla", "key", WIDTH)
    data = pack_tokens(layout, x)
    assert layout.bytes_per_token == 584
    assert data.shape == layout.shape(130, BATCH, 1) == (3, BATCH, 1, 584 * BLOCK_TOKENS)
    for sequence in range(BATCH):
        pages = torch.zeros(3, BLOCK_TOKENS * 584, dtype=torch.uint8)
        k = x[sequence, 0].to(torch.bfloat16)
        deepseek_v4.quantize_and_insert_k_cache(k, pages, torch.arange(130), BLOCK_TOKENS)
        assert torch.equal(data[:2, sequence, 0], pages[:2])
        read = torch.zeros(1, 130, WIDTH, dtype=torch.bfloat16)
        lengths, table = torch.tensor([130]), torch.arange(3)[None]
        own_pages = data[:, sequence, 0].contiguous()
        deepseek_v4.dequantize_and_gather_k_cache(read, own_pages, lengths, None, table, BLOCK_TOKENS, 0)
        decoded = layout.format.decode(layout.format.encode(x[sequence, 0]))
        torch.testing.assert_close(read[0].float(), decoded, rtol=0, atol=0)


def test_latents_keep_three_bits_and_their_rotary_part_all_of_bfloat16() -> None:
    x = latents(500).to(torch.bfloat16).float()
    fmt = get_format("fp8_ds_mla")
    decoded = fmt.decode(fmt.encode(x))
    assert torch.equal(decoded[..., deepseek_v4.NOPE_DIM :], x[..., deepseek_v4.NOPE_DIM :])
    blocks, error = (y[..., : deepseek_v4.NOPE_DIM].unflatten(-1, (-1, 64)) for y in (x, (decoded - x).abs()))
    step = blocks.abs().amax(-1, keepdim=True).clamp(min=deepseek_v4.MIN_AMAX) * 2 / 448 * 2**-10
    assert (error <= torch.maximum(blocks.abs() / 16, step) * 1.01).all()
    assert torch.equal(fmt.decode({s.name: torch.zeros(3, s.width, dtype=s.dtype) for s in fmt.sections(WIDTH)}),
                       torch.zeros(3, WIDTH))  # fmt: skip


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_spoils_its_64_channels_alone(bad: float) -> None:
    fmt, x = get_format("fp8_ds_mla"), latents(20)
    expected = fmt.decode(fmt.encode(x))
    x[7, 100] = x[8, 500] = bad
    decoded = fmt.decode(fmt.encode(x))
    spoiled = torch.zeros(20, WIDTH, dtype=torch.bool)
    spoiled[7, 64:128] = spoiled[8, 500] = True
    assert decoded[7, 64:128].isnan().all()
    assert torch.equal(decoded[8, 500].isnan(), torch.tensor(bad).isnan())
    assert not decoded[8, 500].isfinite()
    assert torch.equal(decoded[~spoiled], expected[~spoiled])


@pytest.mark.parametrize("residual", ["", "[recent=1,sinks=1,float32]"])
def test_a_packed_cache_of_latents_is_a_tensor(residual: str) -> None:
    layout = PackedLayout.parse(f"fp8_ds_mla{residual}", "key", WIDTH)
    x = latents(BATCH, 1, 200)
    cache = PackedTensor.zeros(x.shape, torch.float32, layout)
    for positions in torch.arange(200).split([130, 1, 69]):
        cache[:, :, positions] = x[:, :, positions]
    stored = layout.format.decode(layout.format.encode(x))
    expected = stored.clone()
    if residual:
        expected[:, :, :64], expected[:, :, 192:] = x[:, :, :64], x[:, :, 192:]
    assert torch.equal(cache.dequantize(), expected)
    assert torch.equal(cache[:, :, 3:70, :5], expected[:, :, 3:70, :5])
    assert torch.equal(cache.flip(0), expected.flip(0))
    assert torch.equal(copy.deepcopy(cache).dequantize(), expected)
