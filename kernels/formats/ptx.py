"""Numbers in PTX text."""

from __future__ import annotations

import struct


def half_pair(x: float) -> str:
    """``x`` twice, as fp16 bits."""
    return "0x" + 2 * struct.pack(">e", x).hex()
