"""Caches that keep recent and first tokens in full precision behave like any tensor, and are exact where promised."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from packed_caches import HEAD_DIM, assert_same, every_order, shape_of, values
from test_packed_tensor import COPIES, IN_PLACE, WRITES, random_step
from test_packed_views import READS
from torch import Tensor

from kvcompile.call.adoption import AdoptionError, adopt
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Residual
from kvcompile.packed.growing_buffer import capacity_blocks
from kvcompile.packed.live_view import LiveView
from kvcompile.packed.memory import cache_nbytes
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.site import FormatPair

FP32 = torch.float32
# The float32 format loses nothing, so the cache must equal a plain cache wherever a token is stored.
LOSSLESS = [
    PackedLayout("float32", "key", HEAD_DIM, Residual(1, 2, FP32)),
    PackedLayout("float32", "value", HEAD_DIM, Residual(0, 1, FP32)),
    PackedLayout("float32", "value", HEAD_DIM, Residual(1, 0, FP32)),
]
LOSSY = [
    PackedLayout("int4_per_channel", "key", HEAD_DIM, Residual(0, 1, FP32)),
    PackedLayout("int8_per_channel", "key", HEAD_DIM, Residual(1, 2, FP32)),
    PackedLayout("turboquant_4bit", "value", HEAD_DIM, Residual(1, 1, FP32)),
]
INT4 = LOSSY[0]

every_lossless = pytest.mark.parametrize("layout", LOSSLESS, ids=lambda layout: f"{layout.spec}-{layout.role}")
every_lossy = pytest.mark.parametrize("layout", LOSSY, ids=lambda layout: layout.spec)


pytestmark = pytest.mark.usefixtures("seed_without_grad")


def pair(layout: PackedLayout, axes: str = "bhtd", tokens: int = 200, *, growing: bool = False):
    """A packed cache of random values and the equal plain cache."""
    x = values(*shape_of(axes, tokens))
    return PackedTensor.from_dense(x, layout, axes, growing=growing), x


def assert_equal(cache: Tensor, plain: Tensor) -> None:
    """Compare the values of a packed tensor, or of a plain tensor that was read from it."""
    if isinstance(cache, PackedTensor):
        assert_same(cache, plain)
    else:
        torch.testing.assert_close(cache, plain, rtol=0, atol=0)


def storage_of(cache: PackedTensor) -> int:
    return cache.packed.untyped_storage().data_ptr()


# A cache like any other


@every_lossless
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@every_order
def test_a_cache_reads_as_the_stored_values(layout, tokens, axes):
    assert_same(*pair(layout, axes, tokens))


@every_lossless
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_every_write_acts_as_on_a_plain_cache(layout, write):
    cache, plain = pair(layout, tokens=70)
    x = values(2, 3, 70, HEAD_DIM)
    write(cache, x)
    write(plain, x)
    assert_same(cache, plain)


@every_lossless
@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_any_other_in_place_operator_acts_as_on_a_plain_cache(layout, write):
    cache, plain = pair(layout, tokens=70)
    write(cache)
    write(plain)
    assert_same(cache, plain)


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_any_other_operator_reads_values(read):
    cache, plain = pair(LOSSLESS[0], tokens=70)
    result = read(cache)
    torch.testing.assert_close(result.clone() if isinstance(result, LiveView) else result, read(plain))


@every_lossless
@pytest.mark.parametrize("take", COPIES.values(), ids=COPIES.keys())
def test_a_copy_equals_the_copy_of_a_plain_cache_and_shares_nothing_with_the_cache(layout, take):
    cache, plain = pair(layout, tokens=70, growing=True)
    copied = take(cache)
    assert_equal(copied, take(plain))
    copied.zero_()
    assert_same(cache, plain)


@every_lossless
@pytest.mark.parametrize("growing", [False, True])
def test_any_sequence_of_operations_means_the_same_on_packed_and_plain_caches(layout, growing):
    rng = torch.Generator().manual_seed(0)
    x = values(2, 2, 60, HEAD_DIM, generator=rng)
    caches: list[tuple[Tensor, Tensor]] = [(PackedTensor.from_dense(x, layout, growing=growing), x)]
    for _ in range(25):
        random_step(rng, layout, caches)
        for cache, plain in caches:
            assert_same(cache, plain)


@every_lossless
def test_views_see_each_others_writes(layout):
    cache, plain = pair(layout)
    views = [(c[:, :, 3:169], c[1], c.transpose(1, 2), c[:, 1:, 90:][..., 74:, :], c[:, :, -1]) for c in (cache, plain)]
    x = values(2, 3, 200, HEAD_DIM)
    cache.copy_(x)
    plain.copy_(x)
    for view, expected in zip(*views, strict=True):
        assert_same(view, expected)
        view.zero_()
        expected.zero_()
    assert_same(cache, plain)


def test_a_prefix_is_whole_and_any_other_view_is_not():
    cache, _ = pair(INT4)
    for whole in (cache, cache[:, :, :65], cache.clone(), cache.transpose(1, 2), cache.mT):
        assert whole.is_whole
    for part in (cache[:, :, 64:], cache[:, :, 1:], cache[0], cache[:, 1:]):
        assert not part.is_whole


def test_a_new_cache_is_zero_and_as_large_as_its_layout_says():
    cache = PackedTensor.zeros((2, 3, 100, HEAD_DIM), FP32, INT4)
    assert not cache.dequantize().any()
    blocks = INT4.header_blocks + 2
    assert cache_nbytes(cache) == 2 * 3 * blocks * INT4.block_bytes


def test_an_impossible_layout_is_refused_with_the_reason():
    for layout, reason in (
        (PackedLayout("int4_per_channel", "key", HEAD_DIM), "at least one block of recent tokens"),
        (
            PackedLayout("int4_per_channel", "key", HEAD_DIM, Residual(1, 0, FP32)),
            "at least one block of recent tokens",
        ),
        (PackedLayout("int4_per_channel", "value", HEAD_DIM, Residual(0, 1, FP32)), "scales per channel are for keys"),
        (PackedLayout("fp8_e4m3", "key", HEAD_DIM, Residual(9, 8, FP32)), "at most 1024 first and recent tokens"),
        (PackedLayout("fp8_e4m3", "key", HEAD_DIM, Residual(0, 1, torch.float16)), "the residual is torch.float16"),
    ):
        with pytest.raises(ValueError, match=reason):
            PackedTensor.zeros((2, 3, 100, HEAD_DIM), FP32, layout)
        with pytest.raises(AdoptionError, match=reason):
            adopt(torch.zeros(2, 3, 100, HEAD_DIM), layout)


# Tokens in full precision


def exact_tokens(cache: PackedTensor, plain: Tensor) -> set[int]:
    """The tokens whose vectors all equal the written values."""
    equal = (cache.dequantize() == plain).all(-1).all(0).all(0)
    return set(equal.nonzero().flatten().tolist())


@every_lossy
@pytest.mark.parametrize("growing", [False, True])
def test_recent_and_first_tokens_are_exact_and_the_others_near(layout, growing):
    cache, plain = pair(layout, tokens=300, growing=growing)
    residual = layout.residual
    first, recent = residual.sink_blocks * BLOCK_TOKENS, (5 - residual.recent_blocks) * BLOCK_TOKENS
    assert exact_tokens(cache, plain) == {*range(first), *range(recent, 300)}
    assert (cache - plain).norm() < 0.15 * plain.norm()


@pytest.mark.parametrize(
    ("pair_of_formats", "text"),
    [
        (FormatPair("int4_per_token_head", "int4_per_token_head", residual_length=16), "1 to 64 recent"),
        (FormatPair("int4_per_channel", "int4_per_token_head"), "1 to 64 recent"),
        (FormatPair("int4_per_token_head", "int4_per_token_head", residual_length=128), "65 to 128 recent"),
        (FormatPair("int4_per_token_head", "int4_per_token_head", 65, sink_tokens=1), "65 to 128 recent, 64 first"),
        (FormatPair("int4_per_token_head", "int4_per_token_head", sink_tokens=64), "64 first"),
    ],
)
def test_a_layout_says_for_people_how_many_tokens_are_exact(pair_of_formats, text):
    layout = pair_of_formats.layout("key", HEAD_DIM, FP32)
    assert layout.description == f"{layout.format_name} ({text})"
    counts = set()
    for tokens in (257, 300, 320):  # the newest block holds one token, some tokens, and all of its tokens
        exact = exact_tokens(*pair(layout, tokens=tokens))
        first = set(range(64)) if "first" in text else set()
        assert first <= exact
        counts.add(len(exact - first))
    if "recent" in text:
        least, most = text.split(" recent")[0].split(" to ")
        assert (min(counts), max(counts)) == (int(least), int(most))
    else:
        assert counts == {0}


def written(layout: PackedLayout, x: Tensor, chunks: list[int]) -> PackedTensor:
    """A cache of the tokens ``x``, written in chunks one after the other."""
    cache = PackedTensor.zeros(x.shape, x.dtype, layout)
    begin = 0
    for chunk in chunks:
        cache[:, :, begin : begin + chunk] = x[:, :, begin : begin + chunk]
        begin += chunk
    return cache


@every_lossy
def test_a_block_is_quantized_once_with_all_its_tokens_however_it_was_filled(layout):
    x = values(2, 3, 300, HEAD_DIM)
    at_once = written(layout, x, [300])
    for chunks in ([60, *[1] * 10, 230], [100, 7, *[5] * 38, 3], [17] * 17 + [11]):
        cache = written(layout, x, chunks)
        # Rotations sum in an order that depends on how many vectors there are.
        tolerance = 1e-5 if layout.format.rotated else 0
        torch.testing.assert_close(cache.dequantize(), at_once.dequantize(), rtol=tolerance, atol=tolerance)
        assert cache[:, :, -44:].dequantize().equal(x[:, :, -44:])


@every_lossy
def test_appending_and_writing_give_the_same_cache(layout):
    x = values(2, 3, 300, HEAD_DIM)
    cache = PackedTensor.zeros((2, 3, 0, HEAD_DIM), FP32, layout, growing=True)
    for chunk in x.split([100, 7, *[1] * 30, *[7] * 23, 2], dim=2):
        cache = torch.cat([cache, chunk], 2)
    tolerance = 1e-5 if layout.format.rotated else 0
    torch.testing.assert_close(
        cache.dequantize(), written(layout, x, [300]).dequantize(), rtol=tolerance, atol=tolerance
    )


def test_a_block_that_was_left_is_opened_again_from_stored_tokens():
    x, new = values(2, 3, 300, HEAD_DIM), values(2, 3, 20, HEAD_DIM)
    cache = written(INT4, x, [300])
    before = cache.dequantize()
    cache[:, :, 70:90] = new  # block 1 is quantized, because block 4 took its slot
    assert cache[:, :, 70:90].dequantize().equal(new)
    untouched = [*range(70), *range(90, 256)]
    assert cache.dequantize()[:, :, untouched].equal(before[:, :, untouched])
    # The block that lost the slot is now read quantized.
    assert exact_tokens(cache[:, :, 256:], x[:, :, 256:]) == set()
    assert (cache - torch.cat([x[:, :, :70], new, x[:, :, 90:]], 2)).norm() < 0.15 * x.norm()


@every_lossy
def test_a_crop_and_other_tokens_after_it_leave_the_tokens_before_it_unchanged(layout):
    x, new = values(2, 3, 300, HEAD_DIM), values(2, 3, 150, HEAD_DIM)
    cache = PackedTensor.from_dense(x, layout, growing=True)
    before = cache.dequantize()
    kept = cache[:, :, :100]
    longer = torch.cat([kept, new], 2)
    assert longer[:, :, -40:].dequantize().equal(new[:, :, -40:])
    # Block 1 was reopened and closed again, so its old tokens are quantized a second time, with the new tokens.
    assert (longer[:, :, :100] - x[:, :, :100]).norm() < 0.25 * x[:, :, :100].norm()
    assert longer[:, :, :64].dequantize().equal(before[:, :, :64])
    assert cache.dequantize().equal(before)


def test_rejected_drafts_leave_recent_tokens_exact():
    x = values(2, 3, 200, HEAD_DIM)
    cache = written(INT4, x, [130])
    for begin in range(130, 188, 2):  # drafts of five tokens; the first two are accepted
        cache[:, :, begin : begin + 5] = torch.cat([x[:, :, begin : begin + 2], values(2, 3, 3, HEAD_DIM)], 2)
        assert cache[:, :, 128 : begin + 2].dequantize().equal(x[:, :, 128 : begin + 2])
    cache[:, :, 188:] = x[:, :, 188:]
    assert cache.dequantize().equal(written(INT4, x, [200]).dequantize())


def test_with_two_recent_blocks_drafts_that_are_rejected_across_the_end_of_a_block_leave_no_trace():
    layout, x = LOSSY[1], values(2, 3, 300, HEAD_DIM)
    cache = written(layout, x, [120])
    for begin in range(120, 200, 3):  # drafts of eight tokens; the first three are accepted
        cache[:, :, begin : begin + 8] = torch.cat([x[:, :, begin : begin + 3], values(2, 3, 5, HEAD_DIM)], 2)
    cache[:, :, 201:] = x[:, :, 201:]
    assert cache.dequantize().equal(written(layout, x, [300]).dequantize())


def test_a_draft_that_is_rejected_across_the_end_of_a_block_costs_one_more_quantization_at_most():
    x = values(2, 3, 130, HEAD_DIM)
    cache = written(INT4, x, [126])
    cache[:, :, 126:130] = values(2, 3, 4, HEAD_DIM)  # fills block 1 and begins block 2, which takes the slot
    cache[:, :, 126:127] = x[:, :, 126:127]
    error = (cache[:, :, 64:127] - x[:, :, 64:127]).abs().amax()
    step = (x.amax(2) - x.amin(2)).amax() / 15
    assert error <= step


@pytest.mark.parametrize("layout", [LOSSY[1], LOSSY[2]], ids=lambda layout: layout.spec)
def test_first_tokens_stay_exact_whatever_is_written_behind_them(layout):
    x = values(2, 3, 300, HEAD_DIM)
    cache = written(layout, x, [50, 250])
    for begin in (64, 128, 250, 100):
        cache[:, :, begin : begin + 40] = values(2, 3, 40, HEAD_DIM)
        assert cache[:, :, :64].dequantize().equal(x[:, :, :64])
    cache[:, :, 3:5] = x[:, :, 70:72]
    assert cache[:, :, :64].dequantize().equal(torch.cat([x[:, :, :3], x[:, :, 70:72], x[:, :, 5:64]], 2))


def test_every_sequence_and_head_has_separate_recent_tokens():
    x = values(2, 3, 1, HEAD_DIM)
    cache, plain = pair(INT4, tokens=300)
    positions = torch.tensor([[5, 70, 299], [200, 130, 131]])
    sequence, head = torch.arange(2)[:, None, None], torch.arange(3)[:, None]
    cache[sequence, head, positions[..., None]] = x
    for b in range(2):
        for h in range(3):
            position = int(positions[b, h])
            begin = position // BLOCK_TOKENS * BLOCK_TOKENS
            assert torch.equal(cache[b, h, position].dequantize(), x[b, h, 0])
            others = [t for t in range(begin, min(begin + 64, 300)) if t != position]
            assert (cache[b, h].dequantize()[others] - plain[b, h, others]).abs().max() < 0.6


def test_values_that_are_not_finite_are_exact_while_they_are_recent_and_touch_no_other_token():
    x = values(2, 3, 130, HEAD_DIM)
    x[:, :, 70, 3], x[:, :, 129, 5] = torch.inf, torch.nan
    cache = written(INT4, x, [100, 30])
    recent = cache[:, :, 128:].dequantize()
    assert torch.equal(recent.isnan(), x[:, :, 128:].isnan())
    assert recent[:, :, 0].equal(x[:, :, 128])
    finite = [*range(70), *range(71, 128)]
    assert (cache.dequantize()[:, :, finite] - x[:, :, finite]).norm() < 0.15 * x[:, :, finite].norm()
    assert cache[:, :, 70].isfinite().all()  # the format stores a vector without its own scale as zeros


# Copies, growth, adoption


def bytes_of(cache: PackedTensor) -> Tensor:
    return cache.packed.clone()


@every_lossy
def test_copies_of_the_whole_cache_are_exact(layout):
    cache, _ = pair(layout)
    expected = cache.dequantize()
    other = PackedTensor.zeros(cache.shape, FP32, layout).copy_(cache)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    module, copied = torch.nn.Module(), torch.nn.Module()
    module.register_buffer("cache", cache)
    copied.register_buffer("cache", PackedTensor.zeros(cache.shape, FP32, layout))
    copied.load_state_dict(module.state_dict())
    for copy_of in (cache.clone(), copy.deepcopy(cache), cache.to("cpu", copy=True), other, loaded, copied.cache):
        assert copy_of.packed_layout == layout
        assert copy_of.dequantize().equal(expected)
    x = values(2, 3, 100, HEAD_DIM)
    for copy_of in (cache.clone(), loaded, other):
        copy_of[:, :, 100:] = x
        assert copy_of[:, :, -8:].dequantize().equal(x[:, :, -8:])


@every_lossy
def test_reordered_beams_keep_their_recent_tokens(layout):
    cache, plain = pair(layout, growing=True)
    expected = cache.dequantize()
    beams = torch.tensor([1, 1, 0])
    reordered = cache.index_select(0, beams)
    assert torch.equal(bytes_of(reordered), bytes_of(cache)[:, beams])
    x = values(3, 3, 1, HEAD_DIM)
    longer = torch.cat([reordered, x], 2)
    assert longer.dequantize().equal(torch.cat([expected[beams], x], 2))
    joined = torch.cat([cache, cache[:1]])
    assert joined.dequantize().equal(torch.cat([expected, expected[:1]]))
    assert exact_tokens(joined[:, :, 192:], plain[[0, 1, 0], :, 192:]) == set(range(8))


def test_a_cache_of_another_length_is_copied_and_the_rest_stays():
    cache, plain = pair(LOSSLESS[0], tokens=300)
    short, plain_short = pair(LOSSLESS[0], tokens=150)
    cache[:, :, :150].copy_(short)
    assert_same(cache, torch.cat([plain_short, plain[:, :, 150:]], 2))
    cache, plain = pair(LOSSLESS[1], tokens=300)
    long, plain_long = pair(LOSSLESS[1], tokens=500)
    cache.copy_(long[:, :, :300])
    assert_same(cache, plain_long[:, :, :300])


def test_a_cleared_cache_equals_a_new_cache():
    cache, _ = pair(INT4, tokens=256)
    cache.zero_()
    assert not cache.dequantize().any()
    x = values(2, 3, 256, HEAD_DIM)
    cache[:, :, :100] = x[:, :, :100]
    assert cache.dequantize()[:, :, 64:100].equal(x[:, :, 64:100])
    assert not cache.dequantize()[:, :, 100:].any()


def test_appending_copies_the_cache_only_when_its_storage_is_full():
    cache = PackedTensor.zeros((2, 3, 0, HEAD_DIM), FP32, INT4, growing=True)
    x = values(2, 3, 400, HEAD_DIM)
    storages = []
    for tokens in x.split(4, dim=2):
        cache = torch.cat([cache, tokens], 2)
        storages.append(storage_of(cache))
    assert len(set(storages)) <= 5
    assert exact_tokens(cache, x) == set(range(384, 400))


def test_the_storage_of_a_cache_is_at_most_one_and_a_half_times_its_length_and_the_header():
    for length in (1025, 1100, 5000, 30001):
        assert capacity_blocks(length) * BLOCK_TOKENS <= 1.5 * length
    cache, _ = pair(INT4, tokens=1025, growing=True)
    for tokens in (1, 63, 64, 300, 1):
        cache = torch.cat([cache, values(2, 3, tokens, HEAD_DIM)], 2)
        used = cache.shape[2] * INT4.bytes_per_token + INT4.residual_bytes
        assert cache_nbytes(cache) <= 1.5 * 6 * used


def test_caches_that_share_a_storage_never_see_a_wrong_token():
    short, plain = pair(INT4, tokens=300, growing=True)
    assert exact_tokens(short, plain) == set(range(256, 300))
    x = values(2, 3, 80, HEAD_DIM)
    long = torch.cat([short, x], 2)
    assert storage_of(long) == storage_of(short)
    step = (plain.amax(2) - plain.amin(2)).amax() / 15
    # The longer cache has the slot now, so the last tokens of the shorter cache are read quantized.
    assert exact_tokens(short, plain) == set()
    assert (short - plain).abs().max() <= step
    fork = torch.cat([short, x[:, :, 50:60]], 2)
    assert storage_of(fork) != storage_of(short)
    assert fork[:, :, 300:].dequantize().equal(x[:, :, 50:60])
    assert (fork[:, :, :300] - plain).abs().max() <= step
    assert (long - torch.cat([plain, x], 2)).abs().max() <= step
    assert exact_tokens(long[:, :, 320:], x[:, :, 20:]) == set(range(60))


def test_an_adopted_cache_that_is_not_full_keeps_its_last_written_tokens():
    x = values(2, 3, 300, HEAD_DIM)
    x[:, :, 150:] = 0
    cache = x.clone()
    adopt(cache, INT4)
    assert exact_tokens(cache, x) >= {*range(128, 300)}
    more = values(2, 3, 10, HEAD_DIM)
    cache[:, :, 150:160] = more
    assert cache[:, :, 128:160].dequantize().equal(torch.cat([x[:, :, 128:150], more], 2))


# Benefit of scales per channel


@pytest.mark.parametrize("num_written", [torch.tensor(100), torch.tensor([100, 30])], ids=["all", "each sequence"])
def test_only_the_tokens_said_to_be_written_count_for_the_recent_blocks(num_written):
    x = values(2, 3, 192, HEAD_DIM)
    is_written = torch.arange(192) < num_written.reshape(-1, 1, 1)
    cleared = torch.where(is_written[..., None], x, 0.0)
    filled = torch.where(is_written[..., None], x, 1e4)
    recent = PackedTensor.from_dense(filled, INT4, num_written=num_written)
    for sequence, count in enumerate(num_written.expand(2)):
        block = slice(count // BLOCK_TOKENS * BLOCK_TOKENS, count)
        assert torch.equal(recent[sequence, :, block].dequantize(), x[sequence, :, block])
    expected = PackedTensor.from_dense(cleared, INT4)
    assert torch.equal(recent.packed_layout.tags(recent.packed), expected.packed_layout.tags(expected.packed))
    unknown = PackedTensor.from_dense(filled, INT4, num_written=torch.tensor(0))
    assert torch.equal(unknown.packed, PackedTensor.from_dense(filled, INT4).packed)


def test_keys_with_an_outlier_channel_lose_less_with_scales_per_channel():
    keys = torch.randn(1, 4, 512, 64)
    keys[..., 7] += 40
    query = torch.randn(1, 4, 16, 64)
    expected = query @ keys.mT

    def error_of_scores(layout: PackedLayout) -> float:
        scores = query @ PackedTensor.from_dense(keys, layout).dequantize().mT
        # Attention does not change if all scores of a query grow by a constant.
        difference = (scores - expected) - (scores - expected).mean(-1, keepdim=True)
        return float(difference.norm() / (expected - expected.mean(-1, keepdim=True)).norm())

    per_channel = error_of_scores(PackedLayout("int4_per_channel", "key", 64, Residual(0, 1, FP32)))
    for name in ("int4_per_token_head", "int4_unrotated", "turboquant_4bit"):
        assert per_channel < error_of_scores(PackedLayout(name, "key", 64)) / 2


def test_a_cache_without_sequences_is_packed():
    for axes in ("bhtd", "tbhd"):
        shape = tuple({"b": 0, "h": 1, "t": 130, "d": 16}[axis] for axis in axes)
        cache = PackedTensor.from_dense(
            torch.zeros(shape), PackedLayout.parse("float32[recent=0,sinks=1,float32]", "key", 16), axes
        )
        assert cache.dequantize().shape == shape
