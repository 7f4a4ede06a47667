"""The base class of cache formats: how the K or V vectors of one head become bytes, and back.

Every format obeys one law. It lets one store kernel and one attention kernel serve all formats:

    decode(code, scale, zero) = static_scale * (scale * level(code) + zero)        (in the stored basis)

``level`` maps a code to a number; integer, float and codebook formats differ only in this map.
``scale`` and ``zero`` are shared by all channels of a vector (granularity ``token``), by ``group_size`` channels of it
(``group``), or by the channels of a plane (``plane``). With the granularity ``channel``, the 64 tokens of a block share
them in each channel. A format may have scales without zero points, or neither. ``static_scale`` is one number for all
vectors of a cache, known before the first vector is written. It is part of the format's name and takes no bytes in the
cache; it is 1 except in 8-bit floats with a known scale. A rotated format stores ``x @ R`` instead of ``x``, with an
orthogonal ``R`` (:mod:`kvcompile.kernels.formats.rotation`). A calibrated format first subtracts a mean, and may have
any other matrix in the place of ``R`` (:mod:`kvcompile.kernels.formats.bases`). The result is called the vector in the
stored basis. All-zero bytes decode to zeros in every format. In a calibrated format, only the zero vector has scales
and zero points of zero; the mean is not added to it.

The plain-PyTorch ``encode`` and ``decode`` below are the specification. The CPU path traces them into the graph, and
the Triton codec must agree with them.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Sequence
from typing import Literal

import sympy
import torch
from torch import Tensor

from kvcompile.kernels.formats import bases
from kvcompile.kernels.formats.bit_planes import Packing, Section, WordPacking
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.formats.rotation import rotate, unrotate

HEAD_DIM = sympy.Symbol("head_dim", integer=True, positive=True)
MAX_HEAD_DIM = 512
"""The most channels of a head."""
NARROW_HEAD_DIM = 256
"""The most channels of a head in a rotated or calibrated format. Rotated formats also take MAX_HEAD_DIM."""
BLOCK_TOKENS = 64
"""Tokens of a block. A packed cache is divided into blocks, and scales per channel are shared within a block."""

Granularity = Literal["token", "group", "plane", "channel"]


def float32(x: float) -> float:
    """``x`` rounded to the nearest float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def divided(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``, correctly rounded on every device.

    For a divisor that is a Python number PyTorch multiplies by its reciprocal on a GPU, which rounds twice.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def computed_once(x: Tensor) -> Tensor:
    """``x``, which a compiled graph stores in a buffer: Inductor would otherwise compute it in the loop of every
    reader.

    The result of ``as_strided`` must exist in memory. It has the sizes and strides of ``x``, so its values stay the
    same.
    """
    return x.as_strided(x.size(), x.stride())


class Format(abc.ABC):
    """A cache format. Every family of formats has one subclass, in a separate file.

    Attributes:
        name: the name in policies and in arguments of operators.
        packing: how codes become bytes.
        rotated: whether vectors are rotated before they are encoded.
        rotation_seed: seed of the random signs of the rotation; 0 for a rotation without signs.
        granularity: which channels share a scale and a zero point: all channels of a ``token``, a ``group`` of them, a
            ``plane`` of them, or one ``channel`` of all tokens of a block.
        group_size: channels of a group; 0 for other granularities.
        fixed_head_dim: the only head_dim that the format supports; None if it supports many.
        has_levels: whether the format obeys the law above, so that attention can be computed on its levels. A format
            without levels overrides ``encode`` and ``decode_levels``, and has separate kernels.
        scale_dtype: dtype of scales; None if the format has no scales.
        zero_dtype: dtype of zero points; None if the format has no zero points.
        static_scale: a factor of all vectors, exact in float32; vectors are divided by it before they are quantized.
        takes_static_scale: whether the static scale may be other than 1.
        is_calibrated: whether vectors are quantized in a basis that a calibration has measured.
        basis: the reference to this basis; empty for other formats, and for a calibrated format without a known basis,
            which has sizes but encodes nothing.
        least_scale: the stored scale of a vector of a calibrated format that equals the mean and is not zero.
        nan_scale: the stored scale of a vector that is not finite.
        gain: the ratio of the levels of :meth:`levels` to the levels of the codec.
        codec: the encoder and decoder in Triton, see :mod:`kvcompile.kernels.formats.codec`.
    """

    name: str
    packing: Packing | WordPacking
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
    is_calibrated: bool = False
    basis: str = ""
    least_scale: float = 2.0**-24
    nan_scale: float = float("nan")
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
        """The factor of vectors before they are quantized, rounded to float32: every path has the same product."""
        return float32(1.0 / self.static_scale)

    @property
    def kernel_name(self) -> str:
        """The format that kernels are compiled for: without its static scale, which is an argument of kernels."""
        return self.name

    def stored_dim(self, head_dim: int) -> int:
        """Channels of a vector in the stored basis."""
        return head_dim

    @property
    def plain_name(self) -> str:
        """The format that stores vectors in the stored basis, of ``stored_dim`` channels, in the same bytes."""
        return self.name.partition("@")[0].replace("_mean", "") if self.is_calibrated else self.name

    def num_scales(self, head_dim: int) -> int:
        """The number of scales of a token, or of a block if scales are per channel."""
        groups = head_dim // (self.group_size or 1)
        return {"token": 1, "group": groups, "plane": self.num_planes, "channel": head_dim}[self.granularity]

    def sections(self, head_dim: int) -> tuple[Section, ...]:
        """The sections of a block of one head, in the order in which they lie in memory."""
        sections = list(self.packing.sections(head_dim))
        for name, dtype in (("scale", self.scale_dtype), ("zero", self.zero_dtype)):
            if dtype is not None:
                sections.append(Section(name, dtype, self.num_scales(head_dim), shared=self.granularity == "channel"))
        return tuple(sections)

    def bytes_per_token(self) -> sympy.Expr:
        """Bytes per token and head as an expression in ``head_dim``: codes, scales and zero points."""
        metadata = sum(dtype.itemsize for dtype in (self.scale_dtype, self.zero_dtype) if dtype is not None)
        per_token = {
            "token": sympy.Integer(1),
            "group": HEAD_DIM / (self.group_size or 1),
            "plane": sympy.Integer(self.num_planes),
            "channel": HEAD_DIM / BLOCK_TOKENS,
        }[self.granularity]
        return HEAD_DIM * sympy.Rational(self.packing.bits) / 8 + metadata * per_token

    def unsupported(self, head_dim: int, role: str) -> str | None:
        """The reason why this format cannot hold keys or values (``role``) of ``head_dim``; None if it can."""
        if self.fixed_head_dim is not None:
            return None if head_dim == self.fixed_head_dim else f"head_dim {head_dim} is not {self.fixed_head_dim}"
        most = NARROW_HEAD_DIM if self.rotated or self.is_calibrated else MAX_HEAD_DIM
        takes_widest = self.rotated and not self.is_calibrated
        if (head_dim % 16 or not 16 <= head_dim <= most) and not (takes_widest and head_dim == MAX_HEAD_DIM):
            or_widest = f", nor {MAX_HEAD_DIM}" if takes_widest else ""
            return f"head_dim {head_dim} is not a multiple of 16 between 16 and {most}{or_widest}"
        if self.group_size and head_dim % self.group_size:
            return f"head_dim {head_dim} is not a multiple of the group size {self.group_size}"
        if self.granularity == "channel" and role == "value":
            return "scales per channel are for keys; give values scales per token"
        return None

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize vectors.

        A vector that is not finite in the stored basis changes no other vector. With scales per token or group it gets
        the codes of the zero vector and scales of NaN, and decodes to NaN in every channel. Without such scales nothing
        can mark it, and it is stored as zeros. (Formats of plain floats store it unchanged.)

        Args:
            x: [..., n, head_dim], any float dtype. With scales per channel ``n`` is BLOCK_TOKENS, one block. A
                calibrated format takes [batch, num_kv_heads, ..., n, head_dim].

        Returns:
            A tensor [..., n, width] for each section, by name; [..., 1, width] for a section that a block shares.
        """
        original = x.float()
        x = self.to_stored_basis(original)
        finite = x.abs().amax(-1, keepdim=True) < torch.inf  # the largest magnitude is NaN if one channel is
        x = torch.where(finite, x, 0.0)
        is_zero = None
        if self.is_calibrated:
            is_zero = (original == 0).all(-1, keepdim=True)
            x = torch.where(is_zero, 0.0, x)
        if self.static_scale != 1.0:
            x = x * self.inverse_static_scale
        codes, scale, zero = self._quantize_grouped(x)
        assert codes is not None
        sections = self.packing.pack(codes)
        if scale is not None:
            if is_zero is not None:
                scale = torch.where((scale == 0) & ~is_zero, self.least_scale, scale)
            sections["scale"] = scale if self.granularity == "channel" else torch.where(finite, scale, self.nan_scale)
        if zero is not None:
            sections["zero"] = zero
        return sections

    def to_stored_basis(self, x: Tensor) -> Tensor:
        """Vectors in the stored basis: float32 [..., stored_dim] from float32 [..., head_dim], heads as in encode."""
        x = self.to_plain(x) if self.is_calibrated else x
        return rotate(x, self.rotation_seed) if self.rotated else x

    def from_stored_basis(self, x: Tensor) -> Tensor:
        """Inverse of :meth:`to_stored_basis`, except that it does not add the mean."""
        return self.from_plain(unrotate(x, self.rotation_seed) if self.rotated else x)

    def query_in_stored_basis(self, q: Tensor) -> Tensor:
        """Queries whose product with keys in the stored basis is ``q . (k - mean)``; shapes as in to_stored_basis."""
        q = self.query_in_plain(q)
        return rotate(q, self.rotation_seed) if self.rotated else q

    def to_plain(self, x: Tensor) -> Tensor:
        """The vectors of a calibrated format as its plain format encodes them; shapes as in to_stored_basis."""
        x = x - self.mean(x)
        return bases.product(x, self.basis, "to_stored") if self.has_matrices else x

    def from_plain(self, x: Tensor) -> Tensor:
        """Inverse of :meth:`to_plain`, except that it does not add the mean."""
        return bases.product(x, self.basis, "from_stored") if self.has_matrices else x

    def query_in_plain(self, q: Tensor) -> Tensor:
        """Queries whose product with the vectors of :meth:`to_plain` is ``q . (k - mean)``."""
        return bases.product(q, self.basis, "query") if self.has_matrices else q

    def mean(self, x: Tensor) -> Tensor:
        """The mean of a calibrated format, float32 that broadcasts to ``x`` [batch, num_kv_heads, ..., head_dim].

        Raises:
            ValueError: the format has no basis, or a basis for another number of heads or channels.
        """
        known = self.basis_for(x.shape)
        return bases.mean_of(x, self.basis).view(known.num_heads, *[1] * (x.dim() - 3), known.head_dim)

    def basis_for(self, shape: Sequence[int]) -> bases.Basis:
        """The basis of a calibrated format, for vectors [batch, num_kv_heads, ..., head_dim].

        Raises:
            ValueError: the format has no basis, or a basis for another number of heads or channels.
        """
        if not self.basis:
            raise ValueError(f"{self.name} has no calibration; name a transforms file in the policy")
        known = bases.find(self.basis)
        if (shape[1], shape[-1]) != (known.num_heads, known.head_dim):
            raise ValueError(
                f"{self.name} was calibrated for {known.num_heads} KV heads of {known.head_dim} channels, but the "
                f"vectors are {list(shape)}"
            )
        return known

    @property
    def num_basis_heads(self) -> int | None:
        """The number of KV heads of the basis; None without a basis."""
        return bases.find(self.basis).num_heads if self.basis else None

    @property
    def has_matrices(self) -> bool:
        """Whether the basis is calibrated and has matrices."""
        return False

    def is_written(self, sections: dict[str, Tensor]) -> Tensor:
        """Whether each vector of a calibrated format differs from the zero vector: bool [..., n, 1]."""
        metadata = [sections[name] for name in ("scale", "zero") if name in sections]
        return torch.cat([(x != 0).any(-1, keepdim=True) for x in metadata], -1).any(-1, keepdim=True)

    def _quantize_grouped(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """:meth:`quantize` for the channels that share a scale; scales and zero points are [..., n, width]."""
        if self.granularity in ("token", "plane"):
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
        """Inverse of :meth:`encode`, up to the quantization error: float32 [..., n, head_dim] in the original basis."""
        x = self.from_stored_basis(self.decode_levels(sections))
        return x + torch.where(self.is_written(sections), self.mean(x), 0.0) if self.is_calibrated else x

    def decode_levels(self, sections: dict[str, Tensor]) -> Tensor:
        """Decode in the stored basis: ``static_scale * (scale * level(code) + zero)``."""
        packing = self.packing
        if isinstance(packing, Packing) and packing.unpacks_in_vectors(sections["codes"].shape[-1]):
            x = self.levels(packing.unpack(sections["codes"]))  # without a buffer for each plane
        else:
            planes = [self.levels(codes, i) for i, codes in enumerate(self.packing.planes(sections))]
            x = planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)
        if "scale" in sections:
            x = x * self.per_channel(sections["scale"], x.shape[-1])
        if "zero" in sections:
            x = x + self.per_channel(sections["zero"], x.shape[-1])
        return x if self.static_scale == 1.0 else x * self.static_scale

    def per_channel(self, metadata: Tensor, channels: int) -> Tensor:
        """Scales or zero points [..., width] as float32 that broadcasts to [..., channels] in the stored basis."""
        metadata = self.metadata_of(metadata)
        if self.granularity not in ("group", "plane"):
            return metadata
        repeats = channels // metadata.shape[-1]
        return metadata.unsqueeze(-1).expand(*metadata.shape, repeats).flatten(-2)

    def metadata_of(self, section: Tensor) -> Tensor:
        """The scales or zero points, float32 [...], of the elements of their section."""
        return section.float()

    @abc.abstractmethod
    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Quantize channels that share a scale.

        Args:
            x: float32 [..., m], finite and in the stored basis.

        Returns:
            Codes [..., m], and scale and zero point [..., 1] in the dtypes of their sections; None if the format has no
            such section. With scales per plane, ``m`` is all channels of a vector, and scales are [..., num_planes].
        """

    @abc.abstractmethod
    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        """``level(code)``: float32 [...] from codes [...] of the plane with number ``plane``."""
