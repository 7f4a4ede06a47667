"""What a cache format is: how one head's K or V vectors become bytes, and back.

Every format obeys one law, so that one store kernel and one attention kernel serve them all:

    decode(code, scale, zero) = static_scale * (scale * level(code) + zero)        (in the rotated basis)

``level`` maps a code to a number and is the only thing that differs between integer, float and codebook formats.
``scale`` and ``zero`` are shared by the channels of a vector (per token and head), by ``group_size`` channels of it
(per group), or by one channel of the 64 tokens of a block (per channel); a format may have no zero points, or neither.
``static_scale`` is one number for all vectors of a cache, known before the first is written: it is part of the
format's name and not of the data, and 1 but for calibrated formats.
A rotated format stores ``x @ R`` (R orthogonal, see :mod:`kvcompile.kernels.formats.rotation`) instead of ``x``.
All-zero bytes decode to zeros in every format.

The plain-PyTorch ``encode`` and ``decode`` below are the specification; the CPU path traces them into the graph and the
Triton codec must agree with them.
"""

from __future__ import annotations

import abc
import struct
from typing import Literal

import sympy
import torch
from torch import Tensor

from kvcompile.kernels.formats.bit_planes import Packing, Section
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.formats.rotation import rotate, unrotate

HEAD_DIM = sympy.Symbol("head_dim", integer=True, positive=True)
BLOCK_TOKENS = 64
"""Tokens of a block: what a packed cache is divided into, and what shares a scale per channel."""

Granularity = Literal["token", "group", "channel"]


def float32(x: float) -> float:
    """``x`` rounded to the nearest float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def divided(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``, rounded to the nearest: on a GPU, PyTorch multiplies with the reciprocal of a number."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


class Format(abc.ABC):
    """A cache format. Subclasses live in one file each.

    Attributes:
        name: what policies and op arguments call it.
        packing: how codes become bytes.
        rotated: whether vectors are rotated before they are encoded.
        rotation_seed: of the random signs of the rotation; 0 for none.
        granularity: what shares a scale and a zero point: a ``token``'s vector, a ``group`` of its channels, or a
            ``channel`` of a block of tokens.
        group_size: channels of a group.
        fixed_head_dim: the one head_dim that it is for; None if it is for many.
        has_levels: whether it obeys the law of formats, so that attention can be computed on its levels. Otherwise it
            has an ``encode`` and a ``decode_levels`` of its own, and no kernels.
        scale_dtype: element type of scales; None without them.
        zero_dtype: element type of zero points; None without them.
        static_scale: a factor of all vectors, exact in float32; vectors are divided by it before they are quantized.
        takes_static_scale: whether there may be one other than 1.
        gain: factor between the levels of the codec and those of :meth:`levels`.
        codec: the Triton part, see :mod:`kvcompile.kernels.layout.operand`.
    """

    name: str
    packing: Packing
    rotated: bool = False
    rotation_seed: int = 0
    granularity: Granularity = "token"
    group_size: int = 0
    fixed_head_dim: int | None = None
    has_levels: bool = True
    scale_dtype: torch.dtype | None = torch.float32
    zero_dtype: torch.dtype | None = None
    static_scale: float = 1.0
    takes_static_scale: bool = False
    gain: float = 1.0
    codec: Codec

    @property
    def bits(self) -> float:
        """Bits per code, on average."""
        return float(self.packing.bits)

    @property
    def num_planes(self) -> int:
        return self.packing.num_planes

    @property
    def inverse_static_scale(self) -> float:
        """What vectors are multiplied by before they are quantized: a float32, so that every path has one product."""
        return float32(1.0 / self.static_scale)

    @property
    def kernel_name(self) -> str:
        """The format that kernels are compiled for: they take the static scale as an argument."""
        return self.name

    def num_scales(self, head_dim: int) -> int:
        """Scales per token, or per block if they are per channel."""
        return {"token": 1, "group": head_dim // (self.group_size or 1), "channel": head_dim}[self.granularity]

    def sections(self, head_dim: int) -> tuple[Section, ...]:
        """The sections of one head, in memory order."""
        sections = list(self.packing.sections(head_dim))
        for name, dtype in (("scale", self.scale_dtype), ("zero", self.zero_dtype)):
            if dtype is not None:
                sections.append(Section(name, dtype, self.num_scales(head_dim), shared=self.granularity == "channel"))
        return tuple(sections)

    def bytes_per_token(self) -> sympy.Expr:
        """Bytes per token and head as an expression in ``head_dim`` (payload and metadata, no block padding)."""
        metadata = sum(dtype.itemsize for dtype in (self.scale_dtype, self.zero_dtype) if dtype is not None)
        per_token = {
            "token": sympy.Integer(1),
            "group": HEAD_DIM / (self.group_size or 1),
            "channel": HEAD_DIM / BLOCK_TOKENS,
        }[self.granularity]
        return HEAD_DIM * sympy.Rational(self.packing.bits) / 8 + metadata * per_token

    def unsupported(self, head_dim: int, role: str) -> str | None:
        """Why this format cannot hold keys or values (``role``) of ``head_dim``, or None if it can."""
        if self.fixed_head_dim is not None:
            return None if head_dim == self.fixed_head_dim else f"head_dim {head_dim} is not {self.fixed_head_dim}"
        if head_dim % 16 or not 16 <= head_dim <= 256:
            return f"head_dim {head_dim} is not a multiple of 16 between 16 and 256"
        if self.group_size and head_dim % self.group_size:
            return f"head_dim {head_dim} is not a multiple of the group size {self.group_size}"
        if self.granularity == "channel" and role == "value":
            return "scales per channel are for keys; give values scales per token"
        return None

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize vectors ``x`` [..., n, head_dim] of any float dtype; one tensor [..., n, width] per section.

        With scales per channel ``n`` is the BLOCK_TOKENS tokens of a block, and shared sections are [..., 1, width].

        A vector that is not finite in the stored basis changes no other. With scales per token or group it gets the
        codes of the zero vector and scales of NaN, and decodes to NaN in every channel; without such scales there is
        no way to mark it, and it is stored as zeros (formats of plain floats keep it as it is).
        """
        x = rotate(x.float(), self.rotation_seed) if self.rotated else x.float()
        finite = x.isfinite().all(-1, keepdim=True)
        x = torch.where(finite, x, 0.0)
        if self.static_scale != 1.0:
            x = x * self.inverse_static_scale
        codes, scale, zero = self._quantize_grouped(x)
        assert codes is not None
        sections = self.packing.pack(codes)
        if scale is not None:
            sections["scale"] = scale if self.granularity == "channel" else torch.where(finite, scale, torch.nan)
        if zero is not None:
            sections["zero"] = zero
        return sections

    def _quantize_grouped(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """:meth:`quantize` along the granularity; scales and zeros are [..., n, width] of their sections."""
        if self.granularity == "token":
            return self.quantize(x)
        if self.granularity == "channel":
            codes, scale, zero = self.quantize(x.transpose(-1, -2))
            return (
                codes.transpose(-1, -2),
                *(None if x is None else x.transpose(-1, -2) for x in (scale, zero)),
            )
        codes, scale, zero = self.quantize(x.unflatten(-1, (-1, self.group_size)))
        return (codes.flatten(-2), *(None if x is None else x.squeeze(-1) for x in (scale, zero)))

    def decode(self, sections: dict[str, Tensor]) -> Tensor:
        """Inverse of :meth:`encode` up to the quantization error; float32 [..., n, head_dim] in the original basis."""
        x = self.decode_levels(sections)
        return unrotate(x, self.rotation_seed) if self.rotated else x

    def decode_levels(self, sections: dict[str, Tensor]) -> Tensor:
        """Decode without undoing the rotation: ``static_scale * (scale * level(code) + zero)``."""
        planes = [self.levels(codes, i) for i, codes in enumerate(self.packing.planes(sections))]
        x = planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)
        if "scale" in sections:
            x = x * self.per_channel(sections["scale"])
        if "zero" in sections:
            x = x + self.per_channel(sections["zero"])
        return x if self.static_scale == 1.0 else x * self.static_scale

    def per_channel(self, metadata: Tensor) -> Tensor:
        """Scales or zero points [..., width] -> float32 that broadcasts to [..., head_dim]."""
        metadata = metadata.float()
        if self.granularity != "group":
            return metadata
        return metadata.unsqueeze(-1).expand(*metadata.shape, self.group_size).flatten(-2)

    @abc.abstractmethod
    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Float32 vectors [..., m] that share a scale -> codes [..., m], scale [..., 1] and zero [..., 1].

        The vectors are finite and in the stored basis. Scale and zero have the dtype of their sections, or are None.
        """

    @abc.abstractmethod
    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        """``level(code)``: codes [...] of one plane -> float32 [...]."""
