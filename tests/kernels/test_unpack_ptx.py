"""The PTX that unpacks codes, run by a small interpreter of PTX; no GPU is needed."""

import numpy as np
import pytest
import torch
from ptx_machine import run

from kvcompile.kernels.formats import get_format
from kvcompile.kernels.layout.operand import packed_operand

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
    """Random codes of each plane [WIDTH], and registers of four packed bytes: first codes, then high bits."""
    planes = torch.randint(2 ** int(fmt.bits), (fmt.num_planes, WIDTH), dtype=torch.uint8)
    encoded = fmt.packing.pack(planes.flatten())
    sections = [encoded["codes"].numpy()]
    if "high" in encoded:
        # Kernels load the section once for each piece, with 0 in the columns of the other piece.
        high = encoded["high"].numpy()
        nothing = np.zeros_like(high)
        sections += [np.concatenate([high, nothing]), np.concatenate([nothing, high])]
    return planes, [section.view(np.uint32).tolist() for section in sections]


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
    planes, registers = packed_codes(fmt)
    outputs = [run(fmt.codec.unpack_ptx[0], 2 * fmt.num_planes, *words) for words in zip(*registers, strict=True)]
    levels = planes_of_halves(outputs, fmt.num_planes)
    expected = torch.stack([fmt.levels(plane, i) for i, plane in enumerate(planes)])
    gains = torch.tensor(fmt.codec.unpack_gains or (1.0,) * fmt.num_planes)[:, None] * fmt.gain
    torch.testing.assert_close(levels * gains, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["turboquant_4bit", "turboquant_3bit", "turboquant_2bit", "int4_per_token_head"])
def test_codes_become_integers_at_an_offset_from_the_levels_of_the_specification(name):
    fmt = get_format(name)
    planes, registers = packed_codes(fmt)
    outputs = [run(fmt.codec.integers_ptx, fmt.num_planes, *words) for words in zip(*registers, strict=True)]
    words = np.ascontiguousarray(np.array(outputs, np.uint32).T)
    integers = torch.from_numpy(words.view(np.int8).reshape(fmt.num_planes, WIDTH).copy()).float()
    expected = [fmt.levels(plane, i) for i, plane in enumerate(planes)]
    expected = torch.stack(interleaved(expected) if fmt.codec.interleaved else expected)
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
    outputs = [run(fmt.codec.unpack_ptx[0], 8, *four) for four in zip(*words, strict=True)]
    levels = planes_of_halves(outputs, 4)
    expected = torch.stack([fmt.levels(plane, i) for i, plane in enumerate(planes)])
    torch.testing.assert_close(levels * fmt.gain, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("name", ["531", "4321", "421", "52", "5433", "6", "6433", "63", "6543", "5421"])
def test_words_become_the_levels_of_the_specification_in_halves(name, width):
    fmt = get_format(f"lloyd_max_{name}")
    ptx = packed_operand(fmt.name, "key", fmt.num_parts * width, False, 9).unpack_ptx
    shifts_differ = any(bits < 8 and width * bits // 8 % 4 for bits in fmt.packing.bits_of_sections)
    assert (ptx is None) == shifts_differ  # codes are then unpacked without PTX
    assert packed_operand(fmt.name, "value", fmt.num_parts * width, False, 9).unpack_ptx is not None
    if ptx is None:
        return
    planes = [torch.randint(1 << bits, (width,), dtype=torch.uint8) for bits in fmt.packing.bits_of_planes]
    registers = registers_of_words(fmt.packing, fmt.packing.pack(torch.cat(planes)))
    outputs = [run(ptx, 2 * fmt.num_planes, *four) for four in zip(*registers, strict=True)]
    levels = planes_of_halves(outputs, fmt.num_planes)
    expected = torch.stack([fmt.levels(plane, i) for i, plane in enumerate(planes)])
    torch.testing.assert_close(levels, expected, rtol=2**-11, atol=0)
