"""The DeepSeek-V4 K cache: its specification compared with scalar arithmetic, and the operators."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left

import pytest
import torch
from deepseek_v4_cases import (
    NOWHERE,
    POISON,
    Requests,
    assert_same_bfloat16,
    empty_cache,
    poisoned_output,
    random_cache,
    random_tokens,
)
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvcompile.kernels.deepseek_v4 import ops as deepseek_v4_ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.formats import ds_mla_rows as spec

insert = torch.ops.kvcompile.quantize_and_insert_k_cache.default
gather = torch.ops.kvcompile.dequantize_and_gather_k_cache.default


def float_of(bits):
    """The float32 with the bit pattern ``bits``."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bfloat16_of(x):
    """The bfloat16 pattern of the float64 ``x``, rounded to float32 and then to bfloat16, to nearest even."""
    if math.isnan(x):
        return 0x7FC0
    try:
        bits = struct.unpack("<I", struct.pack("<f", x))[0]
    except OverflowError:
        bits = 0x7F800000 | (x < 0) << 31
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def e4m3(code):
    """The value of an e4m3 byte: 1 sign, 4 exponent and 3 mantissa bits, bias 7, no infinities."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return math.copysign(magnitude, -1.0 if code & 0x80 else 1.0)


MAGNITUDES = [e4m3(code) for code in range(0x7F)]


def nearest_e4m3(x):
    """The byte of the e4m3 number nearest to ``x``, ties to the even byte."""
    above = bisect_left(MAGNITUDES, abs(x))
    code = min({max(above - 1, 0), above}, key=lambda code: (abs(MAGNITUDES[code] - abs(x)), code & 1))
    return code | (0x80 if math.copysign(1.0, x) < 0 else 0)


def token_bytes(k):
    """The 576 data bytes and 8 scale bytes of a token, bfloat16 [512] of finite numbers."""
    patterns = [bits & 0xFFFF for bits in k.view(torch.int16).tolist()]
    x = [float_of(bits << 16) for bits in patterns]
    codes, scales = [], []
    for start in range(0, 448, 64):
        amax = max(max(map(abs, x[start : start + 64])), float_of(0x38D1B717))  # 1e-4 in float32
        exponent = math.ceil(math.log2(amax / 448))  # may be off by one if the logarithm is close to an integer
        exponent = next(e for e in (exponent - 1, exponent, exponent + 1) if amax <= 448 * 2.0**e)
        scales.append(exponent + 127)
        codes += [nearest_e4m3(value / 2.0**exponent) for value in x[start : start + 64]]
    rope = [byte for bits in patterns[448:] for byte in (bits & 0xFF, bits >> 8)]
    return codes + rope, [*scales, 0]


def insert_one_by_one(k, pages, slot_mapping, block_size):
    """Insert token by token and byte by byte into pages, uint8 [num_blocks, block_size * 584]."""
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            data, scales = token_bytes(k[token])
            page, place = pages[slot // block_size], slot % block_size
            page[place * 576 : place * 576 + 576] = torch.tensor(data, dtype=torch.uint8)
            start = block_size * 576 + place * 8
            page[start : start + 8] = torch.tensor(scales, dtype=torch.uint8)


def read_one(page, place, block_size):
    """Token ``place`` of a page, uint8 [block_size * 584], as 512 bfloat16 patterns."""
    data = page[place * 576 : place * 576 + 576].tolist()
    scales = page[block_size * 576 + place * 8 :][:7].tolist()
    values = [e4m3(code) * scale_of(scales[channel // 64]) for channel, code in enumerate(data[:448])]
    return [*map(bfloat16_of, values), *(low | high << 8 for low, high in zip(data[448::2], data[449::2], strict=True))]


def scale_of(byte):
    return math.inf if byte == 255 else 2.0 ** (byte - 127)  # float32 ends below 2**128


def gather_one_by_one(out, k_cache, requests, offset):
    """Gather token by token into ``out``, bfloat16."""
    for req, slots in enumerate(requests.slots()):
        for row, slot in enumerate(slots.tolist()):
            page = k_cache[slot // requests.block_size].flatten()
            patterns = read_one(page, slot % requests.block_size, requests.block_size)
            signed = [bits - (bits >> 15 << 16) for bits in patterns]
            out.view(torch.int16)[req, offset + row] = torch.tensor(signed, dtype=torch.int16)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_inserted_bytes_equal_scalar_arithmetic_and_no_others_change(block_size):
    k = random_tokens(16)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:16].tolist()
    slots[2] = slots[8] = -1
    slots[14] = -5
    k_cache = empty_cache(-(-20 // block_size), block_size)
    expected = k_cache.clone()
    insert(k, k_cache, torch.tensor(slots), block_size)
    insert_one_by_one(k, expected.flatten(1), slots, block_size)
    assert torch.equal(k_cache, expected)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("gather_lens", "offset"), [(None, 0), ([7, 0, 2, 1], 5)])
def test_gathered_rows_equal_scalar_arithmetic_and_no_others_change(block_size, gather_lens, offset):
    requests = Requests.on_shuffled_pages([7, 0, 5, 1], gather_lens, block_size)
    k_cache = random_cache(requests.num_blocks, block_size)
    out = poisoned_output(requests, offset)
    expected = out.clone()
    gather(out, k_cache, *requests.to(out.device), offset)
    gather_one_by_one(expected, k_cache, requests, offset)
    assert_same_bfloat16(out, expected)


def test_every_code_under_every_scale_has_the_value_of_scalar_arithmetic():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 2)[:, :448]
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 7)
    patterns = [[bfloat16_of(e4m3(code) * scale_of(scale)) for code in range(256)] for scale in range(256)]
    expected = torch.tensor(patterns).to(torch.int16).view(torch.bfloat16)
    assert_same_bfloat16(spec.dequantize(codes, scales)[:, :256], expected)


def test_the_scale_of_every_magnitude_follows_the_published_formula():
    magnitude = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(magnitude), 448, dtype=torch.bfloat16)
    x[:, 447] = -magnitude
    _, scales = spec.quantize(x)
    quotient = magnitude.float().clamp(min=1e-4) / 448
    assert torch.equal(scales[:, 6].int(), (quotient.view(torch.int32) + 0x7FFFFF) >> 23)
    assert (scales[:, :6] == 105).all()  # zeros: 1e-4 / 448 is between 2**-23 and 2**-22


def test_reading_back_gives_the_nearest_e4m3_number_times_the_scale():
    k = random_tokens(64)[14:, :448]  # without the rows that overflow
    codes, scales = spec.quantize(k)
    error = (spec.dequantize(codes, scales).double() - k.double()).abs().unflatten(-1, (7, 64))
    step = torch.maximum(k.double().abs().unflatten(-1, (7, 64)) * 2.0**-4, 2.0 ** (scales.double() - 137)[..., None])
    assert (error <= step).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_reads_as_nan_and_no_other_does(bad):
    k = random_tokens(3)[::2]
    k[1, 70] = bad
    codes, scales = spec.quantize(k[:, :448])
    read = spec.dequantize(codes, scales)
    assert read[1, 64:128].isnan().all()
    assert read.isnan().sum() == 64
    assert scales[1, 1] == 255
    assert (codes[1, 64:128] == 0x7F).all()


def test_the_rotary_part_keeps_its_bits():
    k = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1024, 64)
    k = torch.cat([torch.zeros(1024, 448, dtype=torch.bfloat16), k], 1)
    requests = Requests.on_shuffled_pages([1024], None, 64)
    k_cache, out = empty_cache(requests.num_blocks, 64), poisoned_output(requests, 0)
    insert(k, k_cache, requests.slots()[0], 64)
    gather(out, k_cache, *requests.to(out.device), 0)
    assert torch.equal(out[0, :1024, 448:].view(torch.int16), k[:, 448:].view(torch.int16))


def test_tokens_without_a_slot_are_not_inserted():
    k, k_cache = random_tokens(4), empty_cache(2, 4)
    insert(k, k_cache, torch.full((4,), -1), 4)
    assert (k_cache == POISON).all()
    insert(k, k_cache, torch.tensor([], dtype=torch.int64), 4)
    assert (k_cache == POISON).all()
    insert(k, k_cache, torch.tensor([5], dtype=torch.int32), 4)  # the other tokens are padding
    expected = empty_cache(2, 4)
    insert_one_by_one(k, expected.flatten(1), [5], 4)
    assert torch.equal(k_cache, expected)


def test_pages_may_lie_apart_and_have_either_shape():
    k, slots = random_tokens(8), torch.tensor([7, 0, 3, 4, 1, 6, -1, 2])
    buffer = torch.full((2, 4 * 584 + 64), POISON, dtype=torch.uint8)
    expected = buffer.clone()
    insert_one_by_one(k, expected, slots.tolist(), 4)
    insert(k, buffer[:, : 4 * 584], slots, 4)
    assert torch.equal(buffer, expected)
    requests = Requests.on_shuffled_pages([5], None, 4)
    k_cache = random_cache(requests.num_blocks, 4)
    outs = [poisoned_output(requests, 0) for _ in range(2)]
    for out, pages in zip(outs, (k_cache, k_cache.flatten(1)), strict=True):
        gather(out, pages, *requests.to(out.device), 0)
    assert_same_bfloat16(*outs)


@pytest.mark.parametrize("seq_lens", [[], [0], [0, 0, 0]])
def test_gathering_nothing_is_allowed(seq_lens):
    requests = Requests.on_shuffled_pages(seq_lens, None, 4)
    out = poisoned_output(requests, 2)
    expected = out.clone()
    gather(out, random_cache(2, 4), *requests.to(out.device), 2)
    gather(out, random_cache(0, 4), *requests.to(out.device), 2)
    gather(out, random_cache(2, 4), *requests.to(out.device), out.shape[1])
    assert torch.equal(out, expected)


def insert_arguments():
    return random_tokens(5), random_cache(3, 4), torch.tensor([11, -1, 0, 6, -1]), 4


def gather_arguments(gather_lens=True):
    requests = Requests.on_shuffled_pages([6, 3], [2, 3] if gather_lens else None, 4)
    return poisoned_output(requests, 1), random_cache(requests.num_blocks, 4), *requests.to(torch.device("cpu")), 1


def test_the_operators_pass_the_checks_of_torch_library():
    torch.library.opcheck(insert, insert_arguments())
    for gather_lens in (True, False):
        torch.library.opcheck(gather, gather_arguments(gather_lens))


@pytest.mark.parametrize(
    ("of", "backend"),
    [
        pytest.param(spec, "aot_eager", id="specification-aot_eager"),
        pytest.param(spec, "inductor", id="specification-inductor", marks=pytest.mark.slow),
        pytest.param(torch.ops.kvcompile, "aot_eager", id="operators-aot_eager"),
        pytest.param(torch.ops.kvcompile, "inductor", id="operators-inductor"),
    ],
)
def test_compiled_code_inserts_and_gathers_in_place(of, backend):
    def step(insert_arguments, gather_arguments):
        of.quantize_and_insert_k_cache(*insert_arguments)
        of.dequantize_and_gather_k_cache(*gather_arguments)

    expected, actual = ((insert_arguments(), gather_arguments()) for _ in range(2))
    step(*expected)
    torch.compile(step, fullgraph=True, backend=backend)(*actual)
    assert torch.equal(actual[0][1], expected[0][1])
    assert_same_bfloat16(actual[1][0], expected[1][0])


def test_fake_tensors_may_have_symbolic_sizes():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        tokens, blocks, rows = (mode.shape_env.create_unbacked_symint() for _ in range(3))
        k_cache = torch.empty(blocks, 64, 584, dtype=torch.uint8)
        slots = torch.empty(tokens, dtype=torch.int64)
        assert insert(torch.empty(tokens, 512, dtype=torch.bfloat16), k_cache, slots, 64) is None
        lens, table = torch.empty(2, dtype=torch.int32), torch.empty(2, 9, dtype=torch.int32)
        out = torch.empty(2, rows, 512, dtype=torch.bfloat16)
        assert gather(out, k_cache, lens, None, table, 64, tokens) is None


def replaced(arguments, index, value):
    return [*arguments[:index], value, *arguments[index + 1 :]]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, random_tokens(5).float(), r"k must be bfloat16 \[num_tokens, 512\]"),
        (0, random_tokens(5)[:, :448], "k must be bfloat16"),
        (0, random_tokens(4), r"slot_mapping must be int32 or int64 \[at most 4\]"),
        (1, random_cache(3, 4).to(torch.int8), "k_cache must be uint8"),
        (1, random_cache(3, 5), r"k_cache must be uint8 \[num_blocks, 4, 584\] or \[num_blocks, 2336\]"),
        (1, random_cache(3, 4).flatten(), "k_cache must be"),
        (1, random_cache(3, 4).transpose(1, 2).contiguous().transpose(1, 2), "pages contiguous"),
        (1, random_cache(1, 4).expand(3, -1, -1), "a multiple of 8 bytes apart"),
        (1, torch.zeros(3, 2337, dtype=torch.uint8)[:, :2336], "a multiple of 8 bytes apart"),
        (1, torch.zeros(4 * 2336, dtype=torch.uint8)[1:7009].view(3, 2336), "starts at an address"),
        (2, torch.zeros(5), "slot_mapping must be"),
        (2, torch.tensor([0, 12]), "slot_mapping has the slot 12, but k_cache has 12: 3 pages of 4 tokens"),
        (3, 0, "block_size must be at least 1"),
    ],
)
def test_insert_refuses_arguments_that_do_not_fit_names_them_and_changes_nothing(index, value, message):
    arguments = replaced(insert_arguments(), index, value)
    before = arguments[1].clone()
    with pytest.raises(ValueError, match=message):
        insert(*arguments)
    assert torch.equal(arguments[1], before)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(2, 9, 512), "out must be bfloat16"),
        (0, torch.zeros(1, 9, 512, dtype=torch.bfloat16), r"out must be bfloat16 \[at least 2"),
        (0, torch.zeros(2, 1, 512, dtype=torch.bfloat16).expand(-1, 9, -1), "not expanded"),
        (1, random_cache(3, 5), "k_cache must be uint8"),
        (2, torch.tensor([6.0, 3.0]), "seq_lens must be"),
        (3, torch.tensor([2]), r"gather_lens must be int32 or int64 \[2\]"),
        (4, torch.zeros(1, 3, dtype=torch.int32), r"block_table must be int32 or int64 \[at least 2"),
        (6, 9, "offset 9 is not within the 7 rows of out"),
        (6, -1, "offset -1 is not within"),
        (3, torch.tensor([2, 4]), "request 1 cannot gather 4 of 3 tokens"),
        (3, torch.tensor([-1, 3]), "request 0 cannot gather -1 of 6 tokens"),
        (2, torch.tensor([13, 3]), "block_table has 3 pages of 4 tokens per"),
        (6, 5, "out has 2 rows from offset 5 on"),
        (4, torch.tensor([[0, NOWHERE, 0], [0, 0, 0]]), "the pages of request 0 in block_table range from -1000000 to"),
        (4, torch.tensor([[0, 0, 0], [5, 0, 0]]), "the pages of request 1 .* but k_cache has 5"),
    ],
)
def test_gather_refuses_arguments_that_do_not_fit_names_them_and_changes_nothing(index, value, message):
    arguments = replaced(gather_arguments(), index, value)
    before = arguments[0].clone()
    with pytest.raises(ValueError, match=message):
        gather(*arguments)
    assert torch.equal(arguments[0], before)
