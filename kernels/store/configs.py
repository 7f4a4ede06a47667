"""How the store kernel shares out tokens and registers, by device and format."""

from __future__ import annotations

from typing import NamedTuple

from kvcompile.kernels.lang.launcher import ceil_div
from kvcompile.kernels.layout.operand import PackedOperand


class StoreTiles(NamedTuple):
    """Tiles of ``tokens`` tokens, ``tiles_per_program`` to each of a head's ``programs``.

    Attributes:
        num_warps: of a program.
        max_registers: of a thread; None for as many as the compiler likes.
    """

    tokens: int
    num_warps: int
    tiles_per_program: int
    programs: int
    max_registers: int | None

    @property
    def options(self) -> dict[str, int]:
        """What Triton compiles with."""
        registers = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, **registers}


def store_tiles(capability: int, operand: PackedOperand, num_tokens: int, num_heads: int, num_sms: int) -> StoreTiles:
    """How ``num_tokens`` tokens are shared out, where there are ``num_heads`` heads of all sequences."""
    if num_tokens == 1:
        return StoreTiles(1, 1, 1, 1, None)
    tokens = operand.block_tokens
    num_warps = max(4, operand.padded_head_dim // 32)  # up to 64 elements a thread
    num_tiles = ceil_div(num_tokens, tokens)
    # Programs of several tiles compute once what these share; enough programs to fill the device evenly come first.
    tiles_per_program = max(1, min(4, num_tiles * num_heads // (32 * num_sms)))
    max_registers = _hopper_registers(operand) if capability == 9 else None
    return StoreTiles(tokens, num_warps, tiles_per_program, ceil_div(num_tiles, tiles_per_program), max_registers)


def _hopper_registers(operand: PackedOperand) -> int:
    """16 warps a multiprocessor are 8 to 15 % faster than 12, unless many values are spilled for them: those of a
    rotation that is no product on tensor cores, or of planes that are gathered."""
    is_gathered = operand.num_planes > 1 and operand.head_dim != operand.padded_head_dim
    return 168 if is_gathered or (operand.rotated and operand.padded_head_dim > 128) else 128
