"""Tiles and registers of the store kernel, by device and format."""

from __future__ import annotations

import functools
from typing import NamedTuple

from kvcompile.kernels.lang.launcher import ceil_div
from kvcompile.kernels.layout.operand import PackedOperand


class StoreTiles(NamedTuple):
    """How the tokens of a head are divided among programs.

    Attributes:
        tokens: tokens of a tile.
        num_warps: warps of a program.
        tiles_per_program: tiles that a program stores, one after the other.
        programs: programs per head.
        max_registers: most registers of a thread; None leaves the number to the compiler.
    """

    tokens: int
    num_warps: int
    tiles_per_program: int
    programs: int
    max_registers: int | None

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        registers = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, **registers}


@functools.cache
def store_tiles(capability: int, operand: PackedOperand, num_tokens: int, num_heads: int, num_sms: int) -> StoreTiles:
    """How to divide the tokens of a store among programs.

    Args:
        capability: the major compute capability; 0 for other devices.
        operand: the compile-time description of the cache.
        num_tokens: tokens per sequence.
        num_heads: KV heads of all sequences.
        num_sms: streaming multiprocessors of the device.
    """
    if num_tokens == 1:
        return StoreTiles(1, 1, 1, 1, None)
    tokens = operand.block_tokens
    num_warps = _num_warps(capability, operand)
    num_tiles = ceil_div(num_tokens, tokens)
    # A program of several tiles makes its rotation matrix once. But there must be enough programs to fill the device.
    tiles_per_program = max(1, min(4, num_tiles * num_heads // (32 * num_sms)))
    max_registers = _hopper_registers(operand, num_warps) if capability == 9 else None
    return StoreTiles(tokens, num_warps, tiles_per_program, ceil_div(num_tiles, tiles_per_program), max_registers)


def _num_warps(capability: int, operand: PackedOperand) -> int:
    """Warps of a program that stores a tile: up to 64 elements per thread, or fewer if values would spill."""
    if operand.rotated and operand.padded_head_dim > 128:
        return 16
    if _has_gathered_planes(operand) and operand.padded_head_dim >= 128 and (capability != 9 or operand.low_bits < 4):
        return 8
    return max(4, operand.padded_head_dim // 32)


def _hopper_registers(operand: PackedOperand, num_warps: int) -> int | None:
    """The register limit for 16 warps per multiprocessor, or for 12 where 16 would spill many values.

    16 warps are 8 to 15 % faster otherwise. Values spill if planes are gathered, or if scales are per channel. There is
    no limit for programs that have more warps because of their registers.
    """
    if num_warps > max(4, operand.padded_head_dim // 32):
        return None
    return 168 if _has_gathered_planes(operand) or operand.granularity == "channel" else 128


def _has_gathered_planes(operand: PackedOperand) -> bool:
    """Whether the planes of a vector are gathered, because its padding lies between them."""
    return operand.num_planes > 1 and operand.head_dim != operand.padded_head_dim
