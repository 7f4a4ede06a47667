"""What a cache format is: how one head's K or V vector of one token becomes bytes, and back.

Every format obeys one law, so that one store kernel and one attention kernel serve them all:

    decode(code, scale, zero) = scale * level(code) + zero        (per token and head, in the rotated basis)

``level`` maps an integer code to a number and is the only thing that differs between integer, float and codebook
formats. ``scale`` and ``zero`` are one number each per token and head; a format without a zero point has ``zero = 0``.
A rotated format stores ``x @ R`` (R orthogonal, see :mod:`kvcompile.kernels.rotation`) instead of ``x``.
All-zero bytes decode to zeros in every format.

The plain-PyTorch ``encode`` and ``decode`` below are the specification; the CPU path traces them into the graph and the
Triton codec must agree with them.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor

from kvcompile.kernels.codec import Codec
from kvcompile.kernels.rotation import rotate, unrotate

HEAD_DIM = sympy.Symbol("head_dim", integer=True, positive=True)


@dataclass(frozen=True)
class Section:
    """One kind of data that a format keeps for every token and head.

    Attributes:
        name: ``codes``, ``scale`` or ``zero``.
        dtype: element type in memory.
        width: elements per token and head.
    """

    name: str
    dtype: torch.dtype
    width: int

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize


class Format(abc.ABC):
    """A cache format. Subclasses live in one file each and are instantiated once, in the registry.

    Attributes:
        name: what policies and op arguments call it.
        bits: bits per code.
        rotated: whether vectors are rotated before they are encoded.
        channels_per_byte: 1 or 2. With 2, byte ``j`` of a token holds channel ``j`` in its low nibble and channel
            ``j + head_dim // 2`` in its high nibble.
        codec: the Triton part, see :mod:`kvcompile.kernels.codec`.
    """

    name: str
    bits: int
    rotated: bool = False
    channels_per_byte: int = 1
    scale_dtype: torch.dtype = torch.float32
    zero_dtype: torch.dtype | None = None
    codec: Codec

    def sections(self, head_dim: int) -> tuple[Section, ...]:
        """The sections of one token and head, in memory order."""
        parts = [Section("codes", torch.uint8, head_dim // self.channels_per_byte)]
        parts.append(Section("scale", self.scale_dtype, 1))
        if self.zero_dtype is not None:
            parts.append(Section("zero", self.zero_dtype, 1))
        return tuple(parts)

    def bytes_per_token(self) -> sympy.Expr:
        """Bytes per token and head as an expression in ``head_dim`` (payload and metadata, no block padding)."""
        metadata = self.scale_dtype.itemsize + (self.zero_dtype.itemsize if self.zero_dtype is not None else 0)
        return HEAD_DIM / self.channels_per_byte + metadata

    def unsupported_head_dim(self, head_dim: int) -> str | None:
        """Why this format cannot hold vectors of ``head_dim``, or None if it can."""
        if head_dim % 16 or not 16 <= head_dim <= 256:
            return f"head_dim {head_dim} is not a multiple of 16 between 16 and 256"
        return None

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize vectors ``x`` [..., head_dim] of any float dtype; returns one tensor [..., width] per section.

        A vector that is not finite in the stored basis gets the codes of the zero vector and the scale NaN: it decodes
        to NaN in every channel, and no other vector changes.
        """
        x = rotate(x.float()) if self.rotated else x.float()
        finite = x.isfinite().all(-1, keepdim=True)
        parts = self.encode_levels(torch.where(finite, x, 0.0))
        parts["scale"] = torch.where(finite, parts["scale"], torch.nan)
        return parts

    def decode(self, parts: dict[str, Tensor]) -> Tensor:
        """Inverse of :meth:`encode` up to the quantization error; float32 [..., head_dim] in the original basis."""
        x = self.decode_levels(parts)
        return unrotate(x) if self.rotated else x

    def decode_levels(self, parts: dict[str, Tensor]) -> Tensor:
        """Decode without undoing the rotation: ``scale * level(code) + zero``."""
        x = self.levels(self.unpack(parts["codes"])) * parts["scale"].float()
        return x + parts["zero"].float() if "zero" in parts else x

    def pack(self, codes: Tensor) -> Tensor:
        """Codes uint8 [..., head_dim] -> bytes uint8 [..., head_dim / channels_per_byte]."""
        if self.channels_per_byte == 1:
            return codes
        low, high = codes.chunk(2, dim=-1)
        return low | (high << 4)

    def unpack(self, packed: Tensor) -> Tensor:
        """Inverse of :meth:`pack`."""
        planes = self.planes(packed)
        return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)

    def planes(self, packed: Tensor) -> tuple[Tensor, ...]:
        """The codes in bytes uint8 [...], one tensor [...] for each of the ``channels_per_byte`` codes of a byte.

        Plane ``i`` of byte ``j`` is the code of channel ``i * width + j``, width being the bytes of a vector.
        """
        return (packed,) if self.channels_per_byte == 1 else (packed & 0xF, packed >> 4)

    @abc.abstractmethod
    def encode_levels(self, x: Tensor) -> dict[str, Tensor]:
        """Encode float32 vectors that are already in the stored (rotated) basis."""

    @abc.abstractmethod
    def levels(self, codes: Tensor) -> Tensor:
        """``level(code)``: uint8 codes [...] -> float32 [...]."""
