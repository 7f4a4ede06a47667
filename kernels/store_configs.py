"""How the store kernel shares out tokens, by device and format."""

from __future__ import annotations

from typing import NamedTuple

from kvcompile.kernels.codec import PackedOperand
from kvcompile.kernels.launcher import ceil_div


class StoreTiles(NamedTuple):
    """``programs`` for each head, each with ``tiles_per_program`` tiles of ``tokens`` tokens.

    Attributes:
        num_warps: of a program.
        max_registers: of a thread; None for as many as the compiler takes.
    """

    tokens: int
    num_warps: int
    tiles_per_program: int
    programs: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What Triton compiles with."""
        registers = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, **registers}


def store_tiles(
    capability: int, operand: PackedOperand, num_tokens: int, num_heads: int, num_sms: int
) -> StoreTiles:
    """How ``num_tokens`` tokens of each of ``num_heads`` heads, of all sequences, are shared out."""
    if num_tokens == 1:
        return StoreTiles(1, 1, 1, 1)
    tokens = operand.block_tokens
    num_tiles = ceil_div(num_tokens, tokens)
    # Programs of several tiles compute once what these share; enough programs to fill the device come first.
    tiles_per_program = max(1, min(4, num_tiles * num_heads // (8 * num_sms)))
    registers = 128 if capability == 9 else None
    return StoreTiles(tokens, 4, tiles_per_program, ceil_div(num_tiles, tiles_per_program), registers)
