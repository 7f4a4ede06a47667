"""The promises of cache formats in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from formats_of_every_kind import KINDS, in_turn
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.kernels.formats import FORMATS, get_format
from kvcompile.kernels.formats.base import HEAD_DIM
from kvcompile.kernels.formats.bit_planes import PACKINGS
from kvcompile.kernels.formats.half import SATURATION, nearest_half
from kvcompile.kernels.formats.rotation import random_signs, rotate
from kvcompile.kernels.formats.turboquant import CENTROIDS, STEP, codebook

HEAD_DIMS = [64, 80, 96, 128, 256]
MAGNITUDES = [1e-42, 1e-30, 1e-10, 1e-6, 1e-3, 1.0, 6e4, 1e6, 1e18, 1e30, 1e36]
LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009501}
DISTORTION = {  # mean squared error of N(0, 1) channels at head_dim 64 to 256
    "int8": 6e-5,
    "int4": 0.0125,
    "int3": 0.06,
    "int2": 0.4,
    "fp8_e4m3": 8e-4,
    "fp8_e5m2": 3.2e-3,
    "turboquant_2bit": 0.121,
    "turboquant_2.5bit": 0.077,
    "turboquant_3bit": 0.0353,
    "turboquant_3.5bit": 0.0225,
    "turboquant_4bit": 0.0097,
    "bfloat16": 6e-6,
    "float16": 1e-7,
    "float32": 1e-20,
}
HALF_SCALE = ["int4_per_token_head", "int4_unrotated", "int4_per_group_32", "int8_per_group_64", "turboquant_4bit"]
NO_SCALE = [name for name, fmt in FORMATS.items() if fmt.scale_dtype is None]
SCALED = [name for name, fmt in FORMATS.items() if fmt.scale_dtype is not None and fmt.granularity != "channel"]
TURBOQUANT = [name for name in FORMATS if name.startswith("turboquant")]

COMPILED = ["int4_per_token_head", "turboquant_2.5bit"]
TRACED = ["int8_per_token_head", "turboquant_2.5bit", "int4_per_channel"]


def every_kind(names):
    """Every kind of format; kinds that are not among ``names`` are slow."""
    params = [pytest.param(get_format(name), marks=() if name in names else pytest.mark.slow) for name in KINDS]
    return pytest.mark.parametrize("fmt", params, ids=KINDS)


every_turboquant = pytest.mark.parametrize("name", TURBOQUANT)
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def every_supported_head_dim():
    """Every format with every head_dim that it supports. By default only two head_dims run for each, in turn."""
    params = []
    for i, fmt in enumerate(FORMATS.values()):
        head_dims = [head_dim for head_dim in HEAD_DIMS if fmt.unsupported(head_dim, "key") is None]
        chosen = head_dims[i % len(head_dims)], head_dims[(i + 2) % len(head_dims)]
        for head_dim in head_dims:
            marks = () if head_dim in chosen else pytest.mark.slow
            params.append(pytest.param(fmt, head_dim, marks=marks, id=f"{fmt.name}-{head_dim}"))
    return pytest.mark.parametrize(("fmt", "head_dim"), params)


every_shape = every_supported_head_dim()


def vectors(count, head_dim, seed=0):
    return torch.randn(count, head_dim, generator=torch.Generator().manual_seed(seed))


def blocks(count, head_dim, seed=0):
    """Vectors in whole blocks, as formats with scales per channel need them."""
    return vectors(count * 64, head_dim, seed).unflatten(0, (count, 64))


def supports(fmt, head_dim):
    return not fmt.group_size or head_dim % fmt.group_size == 0


def expected_distortion(fmt):
    return next(bound for prefix, bound in DISTORTION.items() if fmt.name.startswith(prefix))


def roundtrip(fmt, x):
    return fmt.decode(fmt.encode(x))


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@every_shape
def test_decoding_is_scale_times_level_plus_zero(fmt, head_dim):
    encoded = fmt.encode(blocks(2, head_dim))
    levels = torch.cat([fmt.levels(codes, i) for i, codes in enumerate(fmt.packing.planes(encoded))], -1)
    repeats = head_dim // fmt.num_scales(head_dim)
    scale, zero = (
        encoded.get(name, torch.full((1, 1, head_dim // repeats), default))
        .float()
        .repeat_interleave(repeats, -1)[..., :head_dim]
        for name, default in (("scale", 1.0), ("zero", 0.0))
    )
    expected = scale * levels + zero
    torch.testing.assert_close(fmt.decode_levels(encoded), expected, rtol=1e-6, atol=1e-7)
    stored = rotate(fmt.decode(encoded), fmt.rotation_seed) if fmt.rotated else fmt.decode(encoded)
    torch.testing.assert_close(stored, expected, rtol=1e-4, atol=1e-5)


@every_shape
def test_the_byte_expression_counts_the_bytes_that_encode_returns(fmt, head_dim):
    encoded = fmt.encode(blocks(3, head_dim))
    sections = fmt.sections(head_dim)
    assert list(encoded) == [section.name for section in sections]
    for section in sections:
        assert encoded[section.name].dtype == section.dtype
        assert encoded[section.name].shape == (3, 1 if section.shared else 64, section.width)
    stored = sum(section[0].numel() * section.element_size() for section in encoded.values())
    assert 64 * fmt.bytes_per_token().subs(HEAD_DIM, head_dim) == stored


def test_bytes_per_token_at_head_dim_128():
    sizes = {name: int(fmt.bytes_per_token().subs(HEAD_DIM, 128)) for name, fmt in FORMATS.items()}
    assert sizes == {
        "int8_per_token_head": 132, "int8_per_channel": 136,
        "int8_per_group_32": 136, "int8_per_group_64": 132, "int8_per_group_128": 130,
        "fp8_e4m3": 132, "fp8_e5m2": 132, "fp8_e4m3_unit": 128, "fp8_e5m2_unit": 128,
        "int4_per_token_head": 68, "int4_unrotated": 68, "int4_per_channel": 72,
        "int4_per_group_32": 80, "int4_per_group_64": 72, "int4_per_group_128": 68,
        "int3_unrotated": 52,
        "int2_per_token_head": 36, "int2_unrotated": 36, "int2_per_channel": 40,
        "int2_per_group_32": 48, "int2_per_group_64": 40, "int2_per_group_128": 36,
        "turboquant_2bit": 34, "turboquant_2.5bit": 42, "turboquant_3bit": 50, "turboquant_3.5bit": 58,
        "turboquant_4bit": 66,
        "bfloat16": 256, "float16": 256, "float32": 512,
    }  # fmt: skip


@every_format
def test_zero_bytes_decode_to_zeros(fmt):
    encoded = {s.name: torch.zeros(1 if s.shared else 64, s.width, dtype=s.dtype) for s in fmt.sections(128)}
    decoded = fmt.decode(encoded)
    assert torch.equal(decoded, torch.zeros(64, 128))


@every_format
def test_the_zero_vector_is_exact(fmt):
    assert torch.equal(roundtrip(fmt, torch.zeros(64, 128)), torch.zeros(64, 128))


@every_shape
def test_distortion_of_random_vectors_is_bounded_by_the_bits(fmt, head_dim):
    x = blocks(32, head_dim)
    assert (roundtrip(fmt, x) - x).square().mean() < expected_distortion(fmt)


@pytest.mark.parametrize(("fmt", "dtype"), in_turn(list(FORMATS.values()), [torch.bfloat16, torch.float16]))
def test_the_input_dtype_only_rounds_the_input(fmt, dtype):
    x = blocks(2, 128).to(dtype)
    for name, section in fmt.encode(x).items():
        assert torch.equal(section, fmt.encode(x.float())[name])


@every_head_dim
@pytest.mark.parametrize("bits", PACKINGS)
def test_planes_invert_pack_and_are_runs_of_channels(bits, head_dim):
    packing = PACKINGS[bits]
    generator = torch.Generator().manual_seed(0)
    planes = [
        torch.randint(2 ** packing.plane_bits(i), (5, packing.width(head_dim)), dtype=torch.uint8, generator=generator)
        for i in range(packing.num_planes)
    ]
    encoded = packing.pack(torch.cat(planes, -1))
    assert sum(section.shape[-1] for section in encoded.values()) == head_dim * bits / 8
    for section in packing.sections(head_dim):
        assert encoded[section.name].shape == (5, section.width)
    for actual, expected in zip(packing.planes(encoded), planes, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("fmt", "bad"), in_turn([get_format(name) for name in SCALED], [torch.nan, torch.inf, -torch.inf])
)
def test_a_vector_that_is_not_finite_decodes_to_nan_and_changes_no_other(fmt, bad):
    x = vectors(6, 128)
    expected = fmt.encode(x)
    x[2, 7] = bad
    x[4] = bad
    encoded = fmt.encode(x)
    others = [0, 1, 3, 5]
    for name, section in encoded.items():
        assert torch.equal(section[others], expected[name][others])
    decoded = fmt.decode(encoded)
    assert decoded[[2, 4]].isnan().all()
    assert decoded[others].isfinite().all()
    assert torch.equal(encoded["codes"][[2]], fmt.encode(torch.zeros(1, 128))["codes"])


@pytest.mark.parametrize("name", [*NO_SCALE, "int4_per_channel", "int2_per_channel", "int8_per_channel"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_without_scales_per_token_vectors_that_are_not_finite_are_stored_as_zeros_or_unchanged(name, bad):
    fmt, x = get_format(name), blocks(1, 64)
    x[0, 2, 7] = bad
    decoded, zeroed = roundtrip(fmt, x), x.clone()
    if name in ("bfloat16", "float16", "float32"):
        assert torch.equal(decoded[0, 2, 7].isnan(), x[0, 2, 7].isnan())
        assert not decoded[0, 2, 7].isfinite()
        decoded[0, 2, 7] = zeroed[0, 2, 7] = 0.0
    else:
        zeroed[0, 2] = 0.0
    assert torch.equal(decoded, roundtrip(fmt, zeroed))


@every_format
def test_finite_vectors_of_any_magnitude_decode_to_finite_ones(fmt):
    shapes = torch.stack([torch.ones(128), torch.eye(128)[3], -torch.ones(128), *vectors(61, 128).clamp(-1, 1)])
    for magnitude in MAGNITUDES:
        if fmt.name == "float16" and magnitude > 6e4:
            break  # overflows to infinity, as everywhere in PyTorch
        assert roundtrip(fmt, shapes * magnitude).isfinite().all(), magnitude


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_e4m3"])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 6e4, 1e30])
def test_a_float32_scale_keeps_the_error_relative_at_any_magnitude(name, magnitude):
    x = vectors(50, 64)
    assert relative_error(roundtrip(get_format(name), x * magnitude) / magnitude, x) < 0.04


@pytest.mark.parametrize("name", HALF_SCALE)
@pytest.mark.parametrize("magnitude", [1e-4, 1e-2, 1.0, 1e2, 1.2e4])
def test_a_half_scale_keeps_the_error_relative_from_1e_4_to_6e4(name, magnitude):
    x = vectors(50, 64)
    assert relative_error(roundtrip(get_format(name), x * magnitude) / magnitude, x) < 0.12


@pytest.mark.parametrize("name", HALF_SCALE)
def test_below_the_half_range_the_error_is_no_larger_than_the_vector(name):
    x = vectors(50, 64) * 1e-8
    assert (roundtrip(get_format(name), x) - x).abs().max() < 1.5e-7


@every_format
def test_only_multiples_of_16_and_of_the_group_up_to_256_are_accepted_as_head_dim(fmt):
    for head_dim in (16, 32, *HEAD_DIMS):
        reason = fmt.unsupported(head_dim, "key")
        if not supports(fmt, head_dim):
            assert f"the group size {fmt.group_size}" in reason
        elif fmt.granularity != "channel":
            assert reason is None
    for head_dim in (8, 72, 100, 528, 1024):
        assert str(head_dim) in fmt.unsupported(head_dim, "key")


@every_format
def test_formats_without_calibration_hold_heads_of_512_channels(fmt):
    reason = fmt.unsupported(512, "key")
    if fmt.is_calibrated:
        assert "256" in reason
    elif fmt.granularity != "channel":
        x = vectors(20, 512)
        narrow = relative_error(roundtrip(fmt, x[:, :256]), x[:, :256])
        assert relative_error(roundtrip(fmt, x), x) < 1.3 * narrow + 1e-6


@every_format
def test_rotated_formats_hold_more_than_256_channels_only_if_they_are_512(fmt):
    for head_dim in (320, 384, 496):
        reason = fmt.unsupported(head_dim, "key")
        if fmt.rotated and not fmt.is_calibrated:
            assert reason == f"head_dim {head_dim} is not a multiple of 16 between 16 and 256, nor 512"
        elif not fmt.is_calibrated and supports(fmt, head_dim):
            assert reason is None


def test_only_keys_can_have_scales_per_channel():
    assert get_format("int4_per_channel").unsupported(64, "key") is None
    assert "scales per channel are for keys" in get_format("int4_per_channel").unsupported(64, "value")


def test_a_seed_changes_the_rotation_and_nothing_else():
    plain, seeded, other = (get_format(f"turboquant_3bit{suffix}") for suffix in ("", "_seed1", "_seed2"))
    x = vectors(500, 128)
    errors = [(roundtrip(fmt, x) - x).flatten() for fmt in (plain, seeded, other)]
    for error in errors:
        assert error.square().mean() < expected_distortion(plain)
    assert torch.corrcoef(torch.stack(errors)).fill_diagonal_(0).abs().max() < 0.1
    assert seeded.sections(128) == plain.sections(128)
    signs = random_signs(256, 1)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(signs.sum()) < 64


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'int3'.*fp8_e4m3.*turboquant_4bit"):
        get_format("int3")


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.rotated])
def test_every_rotated_format_may_have_a_seed(name):
    plain, seeded = get_format(name), get_format(f"{name}_seed7")
    assert (seeded.name, seeded.rotation_seed, plain.rotation_seed) == (f"{name}_seed7", 7, 0)
    x = vectors(64, 80)
    assert not torch.equal(seeded.encode(x)["codes"], plain.encode(x)["codes"])
    signed = plain.decode(plain.encode(x * random_signs(80, 7))) * random_signs(80, 7)
    torch.testing.assert_close(roundtrip(seeded, x), signed)


@pytest.mark.parametrize("name", ["int4_unrotated_seed7", "turboquant_4bit_seed0", "turboquant_5bit_seed1"])
def test_only_rotated_formats_have_a_seed_and_it_is_positive(name):
    with pytest.raises(ValueError, match=r"is not rotated.*turboquant_3bit|unknown cache format"):
        get_format(name)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [2.0**-40, 0.0123, 2.0, 2.0**40])
def test_a_static_scale_is_a_factor_of_the_format_without_scales(name, scale):
    fmt, unit = get_format(f"{name}_scale{scale:.9g}"), get_format(f"{name}_unit")
    scale = fmt.static_scale
    assert get_format(fmt.name).static_scale == scale == torch.tensor(scale).item()
    assert fmt.sections(128) == unit.sections(128)
    assert fmt.bytes_per_token() == HEAD_DIM
    x = torch.cat([vectors(50, 64), vectors(50, 64) * 1e5])  # the second half saturates
    encoded = fmt.encode(x * scale)
    assert torch.equal(encoded["codes"], unit.encode(x * scale * fmt.inverse_static_scale)["codes"])
    assert torch.equal(fmt.decode(encoded), unit.decode(encoded) * scale)
    assert fmt.decode(encoded).abs().max() == fmt.largest * scale


def test_a_static_scale_of_one_is_the_format_without_scales():
    assert get_format("fp8_e4m3_scale1.0") is not get_format("fp8_e4m3_unit")
    assert get_format("fp8_e4m3_scale1.0").name == "fp8_e4m3_unit"


@pytest.mark.parametrize("name", ["fp8_e4m3_scale0", "fp8_e4m3_scale1e-20", "fp8_e5m2_scale1e300"])
def test_a_static_scale_has_bounds(name):
    with pytest.raises(ValueError, match=r"static scale must be a number between 2\*\*-40 and 2\*\*40"):
        get_format(name)


@every_kind(TRACED)
def test_encode_and_decode_trace_with_symbolic_sizes_and_without_constants(fmt):
    def fn(x):
        return fmt.decode(fmt.encode(x))

    traced = make_fx(fn, tracing_mode="symbolic")(blocks(5, 96))
    assert not list(traced.named_buffers())
    assert not [node for node in traced.graph.nodes if node.op == "get_attr"]
    x = blocks(9, 96, seed=1)
    assert torch.equal(traced(x), fn(x))


@pytest.fixture
def fresh_compiler():
    """Dynamo would otherwise treat attributes that differ between formats, such as bits, as symbols."""
    torch._dynamo.reset()


@pytest.mark.sampled(2)
@every_kind(COMPILED)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_encoding_gives_the_same_bytes_and_compiled_decoding_the_same_values(fmt):
    @torch.compile
    def encode_and_decode(x, encoded):  # two independent results: one compilation is faster than two
        return fmt.encode(x), fmt.decode(encoded)

    x = (torch.stack([vectors(64, 64) * 50, vectors(64, 64) + 90]) * 64).round() / 64  # their rotation is exact
    encoded = fmt.encode(blocks(2, 64))
    compiled, decoded = encode_and_decode(x, encoded)
    for name, section in compiled.items():
        assert torch.equal(section, fmt.encode(x)[name]), name
    torch.testing.assert_close(decoded, fmt.decode(encoded), rtol=1e-5, atol=1e-5)


def test_int8_codes_are_rounded_multiples_of_a_127th_of_the_largest_channel():
    x = vectors(100, 64)
    encoded = get_format("int8_per_token_head").encode(x)
    torch.testing.assert_close(encoded["scale"], x.abs().amax(-1, keepdim=True) / 127)
    assert encoded["codes"].min() >= 1
    assert torch.all((roundtrip(get_format("int8_per_token_head"), x) - x).abs() <= encoded["scale"] * 0.5001)


def test_fp8_levels_are_the_e4m3_values_and_finite_for_every_byte():
    codes = torch.arange(256, dtype=torch.uint8)
    levels = get_format("fp8_e4m3").levels(codes)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert codes[expected.isnan()].tolist() == [0x7F, 0xFF]
    assert torch.equal(levels[~expected.isnan()], expected[~expected.isnan()])
    assert levels[expected.isnan()].tolist() == [480.0, -480.0]


def test_fp8_codes_round_to_nearest_and_are_never_nan():
    fmt = get_format("fp8_e4m3")
    x = torch.cat([vectors(500, 64), vectors(500, 64).exp(), vectors(500, 64) * 1e-40])
    encoded = fmt.encode(x)
    assert not ((encoded["codes"] & 0x7F) == 0x7F).any()
    finite = torch.arange(256, dtype=torch.uint8)
    grid = fmt.levels(finite[(finite & 0x7F) != 0x7F])
    normal = x[:1000]
    nearest = (normal[..., None] - grid * encoded["scale"][:1000, :, None]).abs().amin(-1)
    actual = (roundtrip(fmt, normal) - normal).abs()
    torch.testing.assert_close(actual, nearest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 0.5, -3.0, 30.0, -1000.0, 5e4])
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0, 100.0, 1e4])
def test_int4_covers_every_channel_within_the_stated_error(offset, spread):
    fmt = get_format("int4_unrotated")
    x = torch.rand(200, 64, generator=torch.Generator().manual_seed(0)) * spread + offset
    encoded = fmt.encode(x)
    scale, zero = encoded["scale"].float(), encoded["zero"].float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    assert torch.all(zero <= low)
    assert torch.all(zero.double() + 15 * scale.double() >= high * (1 - 1e-7))
    bound = (high - low) / 30 * (1 + 2**-10) + low.abs() * 2**-14 + 2**-24
    float32_rounding = x.abs() * 2**-22
    assert torch.all((roundtrip(fmt, x) - x).abs() <= bound + float32_rounding)


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name.startswith("int") and FORMATS[name].scale_dtype == torch.float16]
)
def test_the_grid_of_a_format_with_fp16_scales_ends_within_fp16(name):
    """Attention converts channels with scales per group to fp16."""
    fmt, generator = get_format(name), torch.Generator().manual_seed(0)
    ends = 70000 - 140000 * torch.rand(2, 4000, 1, generator=generator) * torch.tensor([[[1.0]], [[0.1]]])
    x = torch.lerp(ends[0], ends[1], torch.rand(4000, 128, generator=generator).round(decimals=1))
    if fmt.granularity == "channel":
        x = x[:, None].expand(-1, 2, -1)
    assert fmt.decode_levels(fmt.encode(x)).abs().max() <= 65504


@pytest.mark.parametrize("name", ["int4_per_token_head", "int4_unrotated"])
def test_int4_saturates_in_the_stored_basis(name):
    fmt = get_format(name)
    x = torch.tensor([[1e6, -1e6] * 32, [7e4, 0.0] * 32])
    stored = rotate(x) if fmt.rotated else x
    decoded = fmt.decode_levels(fmt.encode(x))
    step = fmt.encode(x)["scale"].float()
    assert torch.all((decoded - stored.clamp(-SATURATION, SATURATION)).abs() <= step * 0.51)


def test_int4_rounds_its_metadata_to_fp16_without_a_cast():
    every_half = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    x = torch.cat([every_half, (every_half[1:] + every_half[:-1]) / 2, vectors(1000, 64).flatten() * 1e-6])
    for value in (x, -x):
        assert torch.equal(nearest_half(value), value.half().float())


def test_int4_keeps_a_constant_vector():
    x = torch.tensor([1.0, -3.14159, 1e-3, 1234.5])[:, None].expand(4, 64)
    torch.testing.assert_close(roundtrip(get_format("int4_unrotated"), x), x, rtol=1e-4, atol=1e-7)


def test_rotation_saves_int4_from_outlier_channels():
    x = vectors(100, 128)
    x[:, 3] *= 50
    rest = [channel for channel in range(128) if channel != 3]
    errors = [
        (roundtrip(get_format(name), x) - x)[:, rest].square().mean().item()
        for name in ("int4_per_token_head", "int4_unrotated")
    ]
    assert errors[0] < errors[1] / 2


@every_turboquant
@every_head_dim
def test_turboquant_keeps_the_norm_up_to_the_rounding_of_its_fp16_scale(name, head_dim):
    fmt = get_format(name)
    x = vectors(200, head_dim) * vectors(200, 1, seed=1).exp()
    torch.testing.assert_close(roundtrip(fmt, x).norm(dim=-1), x.norm(dim=-1), rtol=2**-10, atol=0)


@every_turboquant
def test_turboquant_encodes_to_the_centroid_nearest_to_a_number_of_fp16(name):
    fmt = get_format(name)
    x = vectors(200, 64)
    direction = rotate(x)
    direction = (direction / direction.square().mean(-1, keepdim=True).sqrt() / STEP).half().float()
    for i, codes in enumerate(fmt.packing.planes(fmt.encode(x))):
        centroids = torch.tensor(codebook(fmt.packing.plane_bits(i)))
        nearest = (direction.chunk(fmt.num_planes, -1)[i][..., None] - centroids).abs().argmin(-1)
        assert torch.equal(codes.long(), nearest)


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_the_distortion_of_a_turboquant_codebook_equals_the_distortion_of_lloyd_max(bits):
    centroids = torch.tensor(sorted(codebook(bits)), dtype=torch.float64) * STEP
    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    thresholds = (centroids[1:] + centroids[:-1]) / 2
    error = (x - centroids[torch.bucketize(x, thresholds)]).square()
    distortion = torch.trapezoid(error * density, x).item()
    assert LLOYD_MAX[bits] * 0.9995 < distortion < LLOYD_MAX[bits] * 1.001


@every_turboquant
def test_turboquant_levels_are_its_codebook(name):
    fmt = get_format(name)
    for i, bits in enumerate(fmt.plane_bits):
        levels = fmt.levels(torch.arange(2**bits, dtype=torch.uint8), i)
        torch.testing.assert_close(levels, torch.tensor(codebook(bits)) * STEP, rtol=0, atol=0)


def test_a_gpu_can_look_up_centroids_as_8_bit_integers():
    for centroids in CENTROIDS.values():
        assert list(centroids) == sorted(centroids)
        assert all(centroid % 1 == 0.5 and 0 < centroid < 128 for centroid in centroids)
