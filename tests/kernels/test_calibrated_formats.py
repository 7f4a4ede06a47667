"""The promises of calibrated formats in plain PyTorch: bases, words of unequal planes, and attention on them."""

from __future__ import annotations

import itertools

import pytest
import torch
from calibrated_bases import based, random_basis

from kvcompile.kernels.formats import bases, get_format, is_calibrated, of_heads
from kvcompile.kernels.formats.base import HEAD_DIM
from kvcompile.kernels.formats.bit_planes import WordPacking
from kvcompile.kernels.formats.uniform import FIRST_SCALES, LARGEST_BYTE, NAN_BYTE, scale_of_byte
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.packing import pack_tokens, read_tokens, write_tokens

LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.03455, 4: 0.009501, 5: 0.002505, 6: 0.0006442}
FORMATS = ["transform_5310", "transform_6666", "transform_4200", "turboquant_3bit_mean", "int4_unrotated_mean"]
PAIRS = [("transform_4321", "transform_4200"), ("turboquant_3bit_mean", "int3_unrotated_mean"),
         ("turboquant_2.5bit_mean", "transform_5300"), ("transform_5310", "int4_per_token_head")]  # fmt: skip
every_format = pytest.mark.parametrize("name", FORMATS)


def vectors(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "bits",
    [bits for bits in itertools.product(range(7), repeat=4) if list(bits) == sorted(bits)[::-1] and bits[0]][::7],
)
@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_planes_of_words_invert_pack(bits, head_dim):
    packing = WordPacking(tuple(width for width in bits if width), 4)
    generator = torch.Generator().manual_seed(0)
    planes = [
        torch.randint(1 << width, (5, head_dim // 4), generator=generator).byte() for width in packing.bits_of_planes
    ]
    sections = packing.pack(torch.cat(planes, -1))
    assert sum(section.shape[-1] for section in sections.values()) == head_dim * sum(bits) / 32
    for section in packing.sections(head_dim):
        assert sections[section.name].shape == (5, section.width)
    assert all(map(torch.equal, packing.planes(sections), planes))


@pytest.mark.parametrize("bits", FIRST_SCALES)
def test_levels_are_the_middles_of_equal_cells(bits):
    levels = get_format(f"transform_{bits}000").levels(torch.arange(1 << bits, dtype=torch.uint8))
    edges = torch.linspace(-1, 1, (1 << bits) + 1)
    torch.testing.assert_close(levels, (edges[1:] + edges[:-1]) / 2)


@pytest.mark.parametrize("bits", FIRST_SCALES)
def test_the_best_of_three_scales_is_close_to_the_best_of_all_scales(bits):
    fmt = get_format(f"transform_{bits}000")
    x = vectors(1000, 32) * torch.logspace(-1.5, 1.5, 1000)[:, None]
    codes, scale, _ = fmt.quantize(x)
    size = x.square().sum(-1)
    error = ((fmt.levels(codes) * scale_of_byte(scale) - x).square().sum(-1) / size).mean()
    levels = fmt.levels(torch.arange(1 << bits, dtype=torch.uint8))
    middles = (levels[1:] + levels[:-1]) / 2
    every = scale_of_byte(torch.arange(60, 200))[:, None, None]
    decoded = levels[torch.bucketize(x / every, middles)] * every
    best = ((decoded - x).square().sum(-1).amin(0) / size).mean()
    assert error < 1.03 * best
    assert error < LLOYD_MAX[bits] * {6: 0.8}.get(bits, 1.0)


def test_a_byte_of_a_scale_has_five_bits_of_an_exponent_and_three_of_a_mantissa():
    exponent, mantissa = torch.arange(8, LARGEST_BYTE + 1) // 8, torch.arange(8, LARGEST_BYTE + 1) % 8
    scales = scale_of_byte(torch.arange(256))
    assert torch.equal(scales[8 : LARGEST_BYTE + 1], 2.0 ** (exponent - 15) * (1 + mantissa / 8))
    assert torch.equal(scales[:8], torch.arange(8) * 2.0**-17)
    assert scales[NAN_BYTE].isnan()


@every_format
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_per_token_count_the_sections(name, head_dim):
    fmt = get_format(name)
    assert fmt.bytes_per_token().subs(HEAD_DIM, head_dim) == sum(section.nbytes for section in fmt.sections(head_dim))


@every_format
def test_a_mean_costs_no_precision(name):
    fmt = based(name, num_heads=2, head_dim=64)
    mean = bases.find(fmt.basis).mean[:, None]
    x = vectors(3, 2, 10, 64)
    moved = fmt.decode(fmt.encode(x + mean)) - mean
    torch.testing.assert_close(moved, get_format(fmt.name).decode(fmt.encode(x + mean)) - mean)
    error = (moved - x).square().mean()
    assert error < {"transform_6666": 0.002, "turboquant_3bit_mean": 0.05, "int4_unrotated_mean": 0.02}.get(name, 1)


@every_format
def test_zero_vectors_and_zero_bytes_decode_to_zeros(name):
    fmt = based(name, num_heads=2, head_dim=64)
    sections = fmt.encode(torch.zeros(1, 2, 3, 64))
    assert torch.equal(fmt.decode(sections), torch.zeros(1, 2, 3, 64))
    zeros = {section: torch.zeros_like(x) for section, x in sections.items()}
    assert torch.equal(fmt.decode(zeros), torch.zeros(1, 2, 3, 64))


@every_format
def test_the_mean_itself_is_no_zero_vector(name):
    fmt = based(name, num_heads=2, head_dim=64)
    mean = bases.find(fmt.basis).mean.reshape(1, 2, 1, 64)
    torch.testing.assert_close(fmt.decode(fmt.encode(mean)), mean, atol=0.02, rtol=0)


@every_format
def test_a_vector_that_is_not_finite_decodes_to_nan_and_changes_no_other(name):
    fmt = based(name, num_heads=2, head_dim=64)
    x = vectors(1, 2, 6, 64)
    expected = fmt.decode(fmt.encode(x))
    x[0, 1, 2, 7] = torch.inf
    decoded = fmt.decode(fmt.encode(x))
    assert decoded[0, 1, 2].isnan().all()
    decoded[0, 1, 2] = expected[0, 1, 2]
    assert torch.equal(decoded, expected)


def test_scales_saturate_beyond_their_range():
    fmt = get_format("transform_4000")
    _, scale, _ = fmt.quantize(torch.ones(1, 32) * torch.tensor([[1e-9], [1e9]]))
    assert scale.tolist() == [[0], [LARGEST_BYTE]]


@pytest.mark.parametrize("residual", [None, Residual(1, 1, torch.float32)])
@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("extra", ["", "sinks", "softcap"])
def test_attention_equals_attention_on_decoded_vectors(pair, residual, q_len, extra):
    names = [based(name, num_heads=2, head_dim=64).name if is_calibrated(name) else name for name in pair]
    key, value = PackedLayout(names[0], "key", 64, residual), PackedLayout(names[1], "value", 64, residual)
    k, v = vectors(2, 2, 200, 64), vectors(2, 2, 200, 64, seed=1) + 1
    k[0, 0, 70] = 0  # the mean is not added to it
    k_data, v_data = pack_tokens(key, k), pack_tokens(value, v)
    query, sinks, softcap = vectors(2, 4, q_len, 64), None, 0.0
    scores = query.view(2, 2, 2 * q_len, 64) @ read_tokens(k_data, key, 200).mT / 8
    if extra == "softcap":
        softcap = 3.0
        scores = softcap * torch.tanh(scores / softcap)
    if extra == "sinks":
        sinks = vectors(4)
        scores = torch.cat(
            [scores, sinks.view(1, 2, 2).repeat_interleave(q_len, 2)[..., None].expand(2, -1, -1, -1)], -1
        )
    expected = scores.softmax(-1)[..., :200] @ read_tokens(v_data, value, 200)
    actual = attend(query, k_data, v_data, key, value, kv_len=200, sinks=sinks, softcap=softcap)
    torch.testing.assert_close(actual.view(expected.shape), expected, atol=2e-5, rtol=1e-4)


@every_format
def test_writing_tokens_gives_the_bytes_of_packing_them(name):
    layout = PackedLayout(based(name, num_heads=2, head_dim=64).name, "key", 64)
    x = vectors(3, 2, 70, 64)
    packed = pack_tokens(layout, x)
    written = write_tokens(torch.zeros_like(packed), layout, x, torch.arange(70))
    assert torch.equal(read_tokens(written, layout, 128), read_tokens(packed, layout, 128))


def test_some_heads_of_a_format_decode_as_in_the_whole_format():
    fmt = based("transform_5310", num_heads=4, head_dim=64)
    x = vectors(1, 4, 5, 64)
    part = get_format(of_heads(of_heads(fmt.name, 1, 3), 1, 2))
    assert part.name.endswith("_heads2-3")
    torch.testing.assert_close(part.decode(part.encode(x[:, 2:])), fmt.decode(fmt.encode(x))[:, 2:])


def test_the_plain_format_has_the_seed_and_the_bytes_of_the_calibrated_one():
    fmt = get_format("turboquant_3bit_mean_seed7")
    assert fmt.plain_name == "turboquant_3bit_seed7"
    based_fmt = get_format(f"{fmt.name}@{random_basis(2, 64, 0)}")
    assert based_fmt.plain_name == fmt.plain_name
    x = vectors(1, 2, 5, 64)
    plain, expected = get_format(fmt.plain_name), based_fmt.encode(x)
    assert all(torch.equal(plain.encode(based_fmt.to_plain(x))[name], expected[name]) for name in expected)
    transform = based("transform_5310", num_heads=2, head_dim=64)
    plain, expected = get_format(transform.plain_name), transform.encode(x)
    assert plain.name == "uniform_531"
    assert all(torch.equal(plain.encode(transform.to_plain(x))[name], expected[name]) for name in expected)


def test_errors_name_the_format_and_the_remedy():
    x = vectors(1, 2, 5, 64)
    with pytest.raises(ValueError, match="transform_5310 has no calibration; name a transforms file"):
        get_format("transform_5310").encode(x)
    with pytest.raises(ValueError, match="3 KV heads of 64 channels, but the vectors are"):
        based("transform_5310", num_heads=3, head_dim=64).encode(x)
    with pytest.raises(ValueError, match="from 6 to 0 in descending order"):
        get_format("transform_1234")
    with pytest.raises(ValueError, match="is not loaded; load the policy"):
        get_format("transform_5310@0123456789ab")
    with pytest.raises(ValueError, match="is for another format"):
        get_format(f"transform_5320@{random_basis(2, 64, 32)}")
    with pytest.raises(ValueError, match="fp8_e4m3_unit cannot have a mean"):
        get_format("fp8_e4m3_unit_mean")
    with pytest.raises(ValueError, match="must be float32 and finite"):
        bases.Basis(torch.full((2, 64), torch.nan))
    with pytest.raises(ValueError, match="does not fit the mean"):
        bases.Basis(torch.zeros(2, 64), torch.zeros(2, 64, 32), torch.zeros(3, 32, 64))
