"""The PTX that unpacks codes, run by a small interpreter of PTX; no GPU is needed."""

import numpy as np
import pytest
import torch
from ptx_machine import run

from kvcompile.kernels.formats import get_format
from kvcompile.kernels.layout.operand import for_decode, packed_operand

WIDTH = 32  # bytes of a vector; the PTX unpacks four at a time
FORMATS = [
    "turboquant_4bit",
    "turboquant_3bit",
    "turboquant_2bit",
    "int4_unrotated",
    "int3_unrotated",
    "int2_unrotated",
]


def packed_codes(fmt):
    """Random codes of each plane [WIDTH], and for each way to load them registers of four bytes: codes, then high bits.

    A way to load them is a list of tiles: (index of the tile in ``pieces_of_tiles``, its registers).
    """
    planes = torch.randint(2 ** int(fmt.bits), (fmt.num_planes, WIDTH), dtype=torch.uint8)
    encoded = fmt.packing.pack(planes.flatten())
    codes = encoded["codes"].numpy()
    ways = [[(0, [codes])]]
    if "high" in encoded:
        high = encoded["high"].numpy()
        nothing = np.zeros_like(high)
        # In a tile of the whole plane, the high bits of a piece are 0 in the columns of the other piece.
        whole = [codes, np.concatenate([high, nothing]), np.concatenate([nothing, high])]
        ways = [[(0, whole)], [(1 + i, [piece, high]) for i, piece in enumerate(np.split(codes, 2))]]
    return planes, [[(i, [section.view(np.uint32) for section in sections]) for i, sections in way] for way in ways]


def outputs_of(texts, num_outputs, way):
    """The output registers of all tiles, four columns after four columns."""
    return [
        run(texts[i], num_outputs, *map(int, words)) for i, registers in way for words in zip(*registers, strict=True)
    ]


def interleaved(planes):
    """The order of :func:`kvcompile.kernels.attention.query.interleaved`, in loops."""
    result = [torch.empty_like(plane) for plane in planes]
    for i in range(len(planes) // 2):
        for j in range(0, WIDTH, 4):
            both = torch.stack([planes[i][j : j + 4], planes[i + len(planes) // 2][j : j + 4]], 1).flatten()
            result[2 * i][j : j + 4], result[2 * i + 1][j : j + 4] = both[:4], both[4:]
    return result


def planes_of_halves(outputs, num_planes):
    """The fp16 numbers of each plane, float32 [num_planes, columns]: two registers a plane for four columns."""
    halves = np.array(outputs, np.uint32).reshape(-1, num_planes, 2).transpose(1, 0, 2)
    return torch.from_numpy(np.ascontiguousarray(halves).view(np.float16).reshape(num_planes, -1).copy()).float()


@pytest.mark.parametrize("name", FORMATS)
def test_codes_become_the_levels_of_the_specification_in_halves(name):
    fmt = get_format(name)
    planes, ways = packed_codes(fmt)
    expected = torch.stack([fmt.levels(plane, i) for i, plane in enumerate(planes)])
    gains = torch.tensor(fmt.codec.unpack_gains or (1.0,) * fmt.num_planes)[:, None] * fmt.gain
    for way in ways:
        outputs = outputs_of(fmt.codec.unpack_ptx[0], 2 * fmt.num_planes, way)
        levels = planes_of_halves(outputs, fmt.num_planes)
        torch.testing.assert_close(levels * gains, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["int4_unrotated", "int3_unrotated", "int2_unrotated"])
def test_nested_numbers_less_those_of_the_plane_above_are_the_codes(name):
    fmt = get_format(name)
    planes, ways = packed_codes(fmt)
    for way in ways:
        numbers = planes_of_halves(outputs_of(fmt.codec.nested_ptx, 2 * fmt.num_planes, way), fmt.num_planes)
        for plane, (above, gain) in enumerate(zip(fmt.codec.planes_above, fmt.codec.unpack_gains, strict=True)):
            contained = 0.0 if above is None else numbers[above]
            torch.testing.assert_close((numbers[plane] - contained) * gain, planes[plane].float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "role", "above"),
    [
        ("int4_unrotated", "value", (1, None)),
        ("int3_unrotated", "value", (2, 3, None, None)),
        ("int2_per_token_head", "value", (1, 2, 3, None)),
        ("int4_unrotated", "key", (None, None)),
        ("int4_per_group_32", "value", (None, None)),
        ("turboquant_4bit", "value", (None, None)),
    ],
)
def test_only_values_of_integer_codes_with_a_scale_per_token_are_nested(name, role, above):
    assert for_decode(packed_operand(name, role, 128, False, 9)).planes_above == above
    assert set(for_decode(packed_operand(name, role, 128, True, 9)).planes_above) == {None}  # products in float32


@pytest.mark.parametrize(
    "name", ["turboquant_4bit", "turboquant_3bit", "turboquant_2bit", "int4_per_token_head", "int2_per_token_head"]
)
def test_codes_become_integers_at_an_offset_from_the_levels_of_the_specification(name):
    fmt = get_format(name)
    planes, ways = packed_codes(fmt)
    expected = [fmt.levels(plane, i) for i, plane in enumerate(planes)]
    expected = torch.stack(interleaved(expected) if fmt.codec.interleaved else expected)
    for way in ways:
        outputs = outputs_of(fmt.codec.integers_ptx, fmt.num_planes, way)
        words = np.ascontiguousarray(np.array(outputs, np.uint32).T)
        integers = torch.from_numpy(words.view(np.int8).reshape(fmt.num_planes, WIDTH).copy()).float()
        torch.testing.assert_close((integers + fmt.codec.integer_offset) * fmt.gain, expected, rtol=1e-6, atol=0)


def registers_of_words(packing, encoded):
    """Registers of four neighbouring columns of keys: bytes of words, and sections of fewer bits with their shifts."""
    registers = []
    for bits, section in zip(packing.bits_of_sections, encoded.values(), strict=True):
        if bits >= 8:
            registers += [byte.numpy().copy() for byte in section.chunk(bits // 8)]
        else:
            pieces = 8 // bits
            shifts = bits * np.repeat(np.arange(pieces, dtype=np.uint8), section.numel())
            registers += [np.tile(section.numpy(), pieces), shifts]
    return [np.ascontiguousarray(register, np.uint8).view(np.uint32).tolist() for register in registers]


@pytest.mark.parametrize("width", [8, 16, 20, 24, 32, 64])
@pytest.mark.parametrize("name", ["turboquant_2.5bit", "turboquant_3.5bit"])
def test_planes_of_unequal_bits_become_the_levels_of_the_specification_in_halves(name, width):
    fmt = get_format(name)
    planes = [torch.randint(1 << fmt.packing.plane_bits(i), (width,), dtype=torch.uint8) for i in range(4)]
    codes, *sections = (section.numpy() for section in fmt.packing.pack(torch.cat(planes)).values())
    registers = [codes]
    for section in sections:
        pieces = width // len(section)
        registers += list(np.kron(np.eye(pieces, dtype=np.uint8), section))  # 0 in the columns of other pieces
    words = [np.ascontiguousarray(register).view(np.uint32).tolist() for register in registers]
    (text,) = fmt.codec.unpack_ptx[0]
    outputs = [run(text, 8, *four) for four in zip(*words, strict=True)]
    levels = planes_of_halves(outputs, 4)
    expected = torch.stack([fmt.levels(plane, i) for i, plane in enumerate(planes)])
    torch.testing.assert_close(levels * fmt.gain, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("name", ["531", "4321", "421", "52", "5433", "6", "6433", "63", "6543", "5421"])
def test_words_become_the_levels_of_the_specification(name, width):
    fmt = get_format(f"uniform_{name}")
    ptx = packed_operand(fmt.name, "key", fmt.num_parts * width, False, 9).unpack_ptx
    shifts_differ = any(bits < 8 and width * bits // 8 % 4 for bits in fmt.packing.bits_of_sections)
    assert (ptx is None) == shifts_differ  # codes are then unpacked without PTX
    assert packed_operand(fmt.name, "value", fmt.num_parts * width, False, 9).unpack_ptx is not None
    if ptx is None:
        return
    planes = [torch.randint(1 << bits, (width,), dtype=torch.uint8) for bits in fmt.packing.bits_of_planes]
    registers = registers_of_words(fmt.packing, fmt.packing.pack(torch.cat(planes)))
    outputs = [run(ptx[0], 2 * fmt.num_planes, *four) for four in zip(*registers, strict=True)]
    levels = planes_of_halves(outputs, fmt.num_planes)
    expected = torch.stack([fmt.levels(plane, i) for i, plane in enumerate(planes)])
    torch.testing.assert_close(levels * fmt.gain, expected, rtol=0, atol=0)
    outputs = [run(fmt.codec.integers_ptx[0], fmt.num_planes, *four) for four in zip(*registers, strict=True)]
    integers = np.ascontiguousarray(np.array(outputs, np.uint32).T).view(np.int8).reshape(fmt.num_planes, width)
    torch.testing.assert_close(torch.from_numpy(integers.copy()) * fmt.gain, expected, rtol=0, atol=0)
