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
    num_tiles = ceil_div(num_tokens, tokens)
    # A program of several tiles makes its rotation matrix once. But there must be enough programs to fill the device.
    tiles_per_program = max(1, min(4, num_tiles * num_heads // (32 * num_sms)))
    max_registers = _hopper_registers(operand) if capability == 9 else None
    programs = ceil_div(num_tiles, tiles_per_program)
    return StoreTiles(tokens, operand.store_warps, tiles_per_program, programs, max_registers)


def _hopper_registers(operand: PackedOperand) -> int:
    """The register limit for 16 warps per multiprocessor, or for 12 where 16 would spill many values.

    16 warps are 8 to 15 % faster otherwise. Values spill if scales are per channel, and if channels with padding share
    scales in groups or planes.
    """
    has_padding = operand.head_dim != operand.padded_head_dim
    spills = operand.granularity == "channel" or (operand.granularity in ("group", "plane") and has_padding)
    return 168 if spills else 128
