"""``flex_attention`` on caches is rewritten if its functions are a scale, a softcap, biases and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention, or_masks

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN, Q_LEN = 2, 4, 2, 64, 300, 3
FIRST = 250
"""Position of the first query."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POLICY = "int8_per_token_head"

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
Given = Callable[[str], Any]

pytestmark = pytest.mark.usefixtures("fresh_compiler")
FORMS: dict[Attend, Given] = {}


def form(given: Given) -> Callable[[Attend], Attend]:
    """Register a form of attention. ``given`` makes its tensors on a device."""

    def remember(attend: Attend) -> Attend:
        FORMS[attend] = given
        return attend

    return remember


def blocks(*masks: Any, combined: Any = and_masks) -> Given:
    """The block mask of functions; each function is made for a device."""

    def make(device: str) -> BlockMask:
        of_device = [mask(device) for mask in masks]
        return create_block_mask(combined(*of_device), BATCH, None, Q_LEN, MAX_LEN, device=device)

    return make


def causal(device: str) -> Any:
    first = torch.tensor(FIRST, device=device)
    return lambda b, h, q, kv: q + first >= kv


def padding(device: str) -> Any:
    begin = torch.tensor([0, 130], device=device)
    is_token = torch.arange(MAX_LEN, device=device) >= begin[:, None]
    return lambda b, h, q, kv: is_token[b, kv]


def documents(device: str) -> Any:
    document = torch.arange(MAX_LEN, device=device) // 100
    return lambda b, h, q, kv: document[q + FIRST] == document[kv]


def window(device: str) -> Any:
    return lambda b, h, q, kv: q + FIRST - kv < 40


def prefix(device: str) -> Any:
    return lambda b, h, q, kv: kv < 5


@form(lambda device: None)
def plain(q: Tensor, keys: Tensor, values: Tensor, given: Any) -> Tensor:
    return flex_attention(q, keys, values, enable_gqa=True)


def masked(q: Tensor, keys: Tensor, values: Tensor, block_mask: BlockMask) -> Tensor:
    return flex_attention(q, keys, values, block_mask=block_mask, enable_gqa=True, scale=0.2)


@form(blocks(causal, padding))
def causal_and_padding(q: Tensor, keys: Tensor, values: Tensor, given: Any) -> Tensor:
    return masked(q, keys, values, given)


@form(blocks(causal, documents))
def documents_side_by_side(q: Tensor, keys: Tensor, values: Tensor, given: Any) -> Tensor:
    return masked(q, keys, values, given)


@form(blocks(window, prefix, combined=or_masks))
def window_and_prefix(q: Tensor, keys: Tensor, values: Tensor, given: Any) -> Tensor:
    return masked(q, keys, values, given)


def heads(device: str) -> Tensor:
    return torch.linspace(0.1, 0.9, NUM_HEADS, device=device)


@form(heads)
def alibi(q: Tensor, keys: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    return flex_attention(q, keys, values, lambda s, b, h, q, kv: s + slopes[h] * (kv - q - FIRST), enable_gqa=True)


@form(blocks(causal))
def softcap(q: Tensor, keys: Tensor, values: Tensor, given: Any) -> Tensor:
    return flex_attention(q, keys, values, lambda s, *at: 2 * torch.tanh(s / 2), given, enable_gqa=True)


@form(blocks(causal))
def relative_positions(q: Tensor, keys: Tensor, values: Tensor, given: Any) -> Tensor:
    return flex_attention(q, keys, values, lambda s, b, h, q, kv: s + (kv - q) // 16, given, enable_gqa=True)


@form(lambda device: torch.randn(BATCH, 1, Q_LEN, MAX_LEN, device=device))
def bias_of_a_table(q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Tensor:
    return flex_attention(q, keys, values, lambda s, b, h, q, kv: s + 2.0 * table[b][0][q][kv], enable_gqa=True)


@form(lambda device: None)
def masked_scores(q: Tensor, keys: Tensor, values: Tensor, given: Any) -> Tensor:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where((q + FIRST >= kv) & (kv != 7) | (kv == 9), s * 0.5, -float("inf"))

    return flex_attention(q, keys, values, score_mod, enable_gqa=True)


@form(heads)
def temperature_of_each_head(q: Tensor, keys: Tensor, values: Tensor, temperature: Tensor) -> Tensor:
    return flex_attention(q, keys, values, lambda s, b, h, q, kv: s * temperature[h], enable_gqa=True)


def step_of(attend: Attend) -> Callable[..., Any]:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, given: Any) -> Any:
        keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)
        return attend(q, keys, values, given)

    return step


def inputs(device: str = "cpu") -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Query, keys and values of new tokens; caches; positions."""
    sizes = ((NUM_HEADS, Q_LEN), (NUM_KV_HEADS, Q_LEN), (NUM_KV_HEADS, Q_LEN), *[(NUM_KV_HEADS, MAX_LEN)] * 2)
    tensors = [torch.randn(BATCH, *size, HEAD_DIM, device=device) for size in sizes]
    return tensors[:3], tensors[3:], torch.arange(FIRST, FIRST + Q_LEN, device=device)


def compiled(step: Callable[..., Any], on_unsupported: str = "error") -> Callable[..., Any]:
    return torch.compile(step, backend="kvquant", options={"policy": POLICY, "on_unsupported": on_unsupported})


def packed(caches: list[Tensor], head_dim: int = HEAD_DIM) -> list[PackedTensor]:
    layouts = [PackedLayout(POLICY, role, head_dim) for role in ("key", "value")]
    return [PackedTensor.from_dense(x, layout) for x, layout in zip(caches, layouts, strict=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attend", FORMS, ids=lambda attend: attend.__name__)
def test_it_equals_flex_attention_on_packed_caches(attend: Attend, device: str, request: pytest.FixtureRequest) -> None:
    if device == "cpu":
        request.getfixturevalue("without_code_generation")
    new, caches, positions = inputs(device)
    given, expected = FORMS[attend](device), packed(caches)
    out = compiled(step_of(attend))(*new, *caches, positions, given)
    assert all(isinstance(cache, PackedTensor) for cache in caches)
    assert last_report().sites[0].attention.startswith("flex_attention")
    torch.testing.assert_close(out, step_of(attend)(*new, *expected, positions, given), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_generated_code_does_the_same() -> None:
    new, caches, positions = inputs()
    given, expected = blocks(causal, padding)("cpu"), packed(caches)
    step = step_of(softcap)
    out = compiled(step)(*new, *caches, positions, given)
    torch.testing.assert_close(out, step(*new, *expected, positions, given), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("device", DEVICES)
def test_keys_are_seen_in_the_blocks_that_a_block_mask_names(device: str) -> None:
    """PyTorch's compiled code reads these blocks. Its eager code uses ``mask_mod`` only."""
    count = torch.ones(BATCH, 1, 1, dtype=torch.int32, device=device)
    partial, full = (torch.tensor(i, dtype=torch.int32, device=device).expand(BATCH, 1, 1, 2) for i in ([2, 7], [0, 1]))
    block_mask = BlockMask.from_kv_blocks(
        count, partial, count, full, mask_mod=lambda b, h, q, kv: kv % 2 == 1, seq_lengths=(Q_LEN, MAX_LEN),
        compute_q_blocks=False,
    )  # fmt: skip
    key = torch.arange(MAX_LEN, device=device)
    visible = ((key < 128) | ((key >= 256) & (key % 2 == 1))).expand(Q_LEN, -1)

    new, caches, positions = inputs(device)
    expected = packed(caches)
    out = compiled(step_of(masked))(*new, *caches, positions, block_mask)
    other = step_of(lambda q, *kv: F.scaled_dot_product_attention(q, *kv[:2], visible, scale=0.2, enable_gqa=True))
    torch.testing.assert_close(out, other(*new, *expected, positions, None), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("without_code_generation")
def test_sizes_and_numbers_may_change_from_step_to_step() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, factor: float) -> Tensor:
        keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)
        return flex_attention(q, keys, values, lambda s, b, h, q, kv: s * factor + kv * 0.01, enable_gqa=True)

    run = torch.compile(step, backend="kvquant", options={"policy": POLICY, "on_unsupported": "error"}, dynamic=True)
    # flex_attention of PyTorch 2.15 accepts symbolic integers, but no symbolic float.
    first, second = (0.5, 0.7) if torch.__version__ < "2.15" else (1, 2)
    for factor, head_dim in ((first, HEAD_DIM), (second, HEAD_DIM), (second, HEAD_DIM // 2)):
        new, caches, positions = inputs()
        new, caches = ([x[..., :head_dim].clone() for x in xs] for xs in (new, caches))
        expected = packed(caches, head_dim)
        out = run(*new, *caches, positions, factor)
        torch.testing.assert_close(out, step(*new, *expected, positions, factor), rtol=1e-3, atol=1e-4)
        assert all(isinstance(cache, PackedTensor) for cache in caches)


@pytest.mark.usefixtures("without_code_generation")
def test_a_cache_of_one_head_may_grow_without_a_dimension_of_it() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        return flex_attention(q, keys[:, None], values[:, None], enable_gqa=True), keys, values

    run, plain = compiled(step), [torch.randn(BATCH, 70, HEAD_DIM) for _ in range(2)]
    caches = plain
    for n in (1, 3):
        q, k, v = (torch.randn(BATCH, *size, HEAD_DIM) for size in ((NUM_HEADS, n), (n,), (n,)))
        out, *caches = run(q, k, v, *caches)
        plain = [torch.cat([cache, x], 1) for cache, x in zip(plain, (k, v), strict=True)]
        expected = flex_attention(q, *(x.dequantize()[:, None] for x in caches), enable_gqa=True)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close([cache.dequantize() for cache in caches], plain, rtol=0, atol=0.05)


def with_log_sum_exp(q: Tensor, keys: Tensor, values: Tensor) -> Any:
    return flex_attention(q, keys, values, enable_gqa=True, return_lse=True)


def sine(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return flex_attention(q, keys, values, lambda s, *at: torch.sin(s), enable_gqa=True)


def square(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return flex_attention(q, keys, values, lambda s, b, h, q, kv: s * s, enable_gqa=True)


def scale_of_each_key(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scale = torch.linspace(0.5, 1, MAX_LEN)
    return flex_attention(q, keys, values, lambda s, b, h, q, kv: s * scale[kv], enable_gqa=True)


def sum_of_a_row(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    table = torch.linspace(0, 1, NUM_HEADS * 3).view(NUM_HEADS, 3)
    return flex_attention(q, keys, values, lambda s, b, h, q, kv: s + table[h].sum() * (kv - q), enable_gqa=True)


def mask_of_keys_at_runtime(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scores = torch.ones(MAX_LEN)
    return flex_attention(q, keys, values, lambda s, b, h, q, kv: torch.where(s > 0, s, scores[kv]), enable_gqa=True)


def masked_by_two_constants(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(kv < 3, -1e9, torch.where(kv > 9, torch.finfo(torch.float32).min, s))

    return flex_attention(q, keys, values, score_mod, enable_gqa=True)


REFUSED = {
    with_log_sum_exp: "log-sum-exp",
    sine: "sin is applied",
    square: "combines scores with scores",
    scale_of_each_key: "varies along the keys",
    sum_of_a_row: "calls sum, which is not an element-wise operation on numbers",
    mask_of_keys_at_runtime: "gt is applied",
    masked_by_two_constants: "masked by different constants, -3.40282e+38 and -1e+09",
}


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("attend", REFUSED, ids=lambda attend: attend.__name__)
def test_other_attention_is_refused_with_a_reason(
    attend: Callable[..., Any],
) -> None:
    new, caches, positions = inputs()
    expected = [cache.clone() for cache in caches]
    step = step_of(lambda q, keys, values, given: attend(q, keys, values))
    out = compiled(step, on_unsupported="ignore")(*new, *caches, positions, None)
    torch.testing.assert_close(out, step(*new, *expected, positions, None), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(caches, expected, rtol=0, atol=0)
    (site,) = last_report().sites
    assert site.reason_code == "unrecognised"
    assert REFUSED[attend] in str(site.reason)
