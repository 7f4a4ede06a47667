"""Gather tokens of a packed pool in Triton: :func:`kvcompile.kernels.spec.gather.gather_tokens`, for every format.

For this kernel formats differ only in their sections. A token has some units of up to 8 bytes in each section. The
units of a token are neighbours in a row-major section, and BLOCK_TOKENS units apart in a column-major section.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.lang.launcher import ASSERTING, Launcher
from kvcompile.kernels.lang.triton import jit, tl, triton
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, num_blocks
from kvcompile.kernels.layout.references import is_reference, referred, strides_of

_MAX_CHUNK = 32


@dataclass(frozen=True, eq=False, repr=False)
class GatheredSections:
    """The compile-time description of packed data, one instance for each layout.

    Attributes:
        name: identifies the description; all other attributes follow from it.
        count: number of sections.
        begins: for each section, its byte offset in a block.
        units: for each section, the unsigned integer dtype in which it is copied.
        widths: for each section, the units of a token.
        chunks: for each section, the units that are copied at once, a power of two.
        column_major: for each section, whether it lies [width][block_tokens] instead of [block_tokens][width].
        block_tokens: tokens of a block.
        by_reference: whether the kernel gets a reference, see :mod:`kvcompile.kernels.layout.references`.
    """

    name: str
    count: int
    begins: tuple[int, ...]
    units: tuple[tl.dtype, ...]
    widths: tuple[int, ...]
    chunks: tuple[int, ...]
    column_major: tuple[bool, ...]
    block_tokens: int
    by_reference: bool

    def __repr__(self) -> str:
        return self.name  # Triton uses it in the names of compiled functions

    @functools.cached_property
    def cache_key(self) -> str:
        """The key of this constant in Triton's cache on disk."""
        return str({name: value for name, value in vars(self).items() if name != "cache_key"})


@functools.cache
def gathered_sections(layout: PackedLayout, by_reference: bool) -> GatheredSections:
    """The compile-time description of packed data of ``layout``."""
    column_major = tuple(layout.column_major(section) for section in layout.sections)
    unit_bytes = [
        section.dtype.itemsize if in_columns else _largest_unit(section.nbytes)
        for section, in_columns in zip(layout.sections, column_major, strict=True)
    ]
    widths = tuple(section.nbytes // nbytes for section, nbytes in zip(layout.sections, unit_bytes, strict=True))
    kind = "_".join([layout.role, *(f"{width}x{nbytes}" for width, nbytes in zip(widths, unit_bytes, strict=True))])
    return GatheredSections(
        name=f"sections_{kind}{'_reference' if by_reference else ''}",
        count=len(widths),
        begins=tuple(layout.section_offsets[section.name] for section in layout.sections),
        units=tuple(tl.dtype(f"uint{8 * nbytes}") for nbytes in unit_bytes),
        widths=widths,
        chunks=tuple(min(_MAX_CHUNK, triton.next_power_of_2(width)) for width in widths),
        column_major=column_major,
        block_tokens=BLOCK_TOKENS,
        by_reference=by_reference,
    )


def _largest_unit(nbytes: int) -> int:
    """The largest size of an integer, in bytes, that divides the ``nbytes`` of a token in a row-major section."""
    return next(unit for unit in (8, 4, 2, 1) if nbytes % unit == 0)


@jit(do_not_specialize=["batch_size", "num_kv_heads", "num_tokens", "num_slots"])
def gather_kernel(
    data_ptr, slots_ptr, out_ptr, data_strides, slots_strides, out_strides,
    batch_size, num_kv_heads, num_tokens, num_slots, SECTIONS: tl.constexpr,
):  # fmt: skip
    """One program: one block of the result, of one head and sequence. Grid (num_blocks * batch * num_kv_heads,).

    Args:
        data_ptr: packed data of one sequence, uint8, strides (block, batch, head) in bytes.
        slots_ptr: int64 [batch, num_tokens], strides (batch, token). A slot outside [0, num_slots) fails an assertion,
            as in the indexing kernels of PyTorch, and is not read.
        out_ptr: packed data of ``batch_size`` sequences, uint8, strides (block, batch, head) in bytes.
    """
    data_ptr = referred(data_ptr, SECTIONS)
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    batch = (tl.program_id(0) // num_kv_heads % batch_size).to(tl.int64)
    block = (tl.program_id(0) // num_kv_heads // batch_size).to(tl.int64)
    row = tl.arange(0, SECTIONS.block_tokens)
    token = block * SECTIONS.block_tokens + row
    slot_ptrs = slots_ptr + batch * slots_strides[0] + token * slots_strides[1]
    slot = tl.load(slot_ptrs, mask=token < num_tokens, other=0)
    in_pool = (slot >= 0) & (slot < num_slots)
    tl.device_assert(in_pool, "kvcompile::gather: a slot is outside of the pool")
    source_ptrs = data_ptr + head * data_strides[2] + slot // SECTIONS.block_tokens * data_strides[0]
    target_ptr = out_ptr + block * out_strides[0] + batch * out_strides[1] + head * out_strides[2]
    COUNT: tl.constexpr = SECTIONS.count
    for i in tl.static_range(COUNT):
        _copy_section(source_ptrs, slot % SECTIONS.block_tokens, in_pool, target_ptr, row, i, SECTIONS)


@jit
def _copy_section(
    source_ptrs, source_row, in_pool, target_ptr, row, I: tl.constexpr, SECTIONS: tl.constexpr  # noqa: E741
):  # fmt: skip
    """Copy section I of tokens, from rows ``source_row`` of blocks at ``source_ptrs`` to rows of one block."""
    UNIT: tl.constexpr = SECTIONS.units[I]
    WIDTH: tl.constexpr = SECTIONS.widths[I]
    CHUNK: tl.constexpr = SECTIONS.chunks[I]
    source_ptrs = (source_ptrs + SECTIONS.begins[I]).to(tl.pointer_type(UNIT))
    target_ptr = (target_ptr + SECTIONS.begins[I]).to(tl.pointer_type(UNIT))
    for start in range(0, WIDTH, CHUNK):
        column = start + tl.arange(0, CHUNK)
        copied = in_pool[:, None] & (column < WIDTH)[None, :]
        if SECTIONS.column_major[I]:
            columns = column * SECTIONS.block_tokens
            units = tl.load((source_ptrs + source_row)[:, None] + columns[None, :], mask=copied)
            tl.store((target_ptr + row)[:, None] + columns[None, :], units, mask=copied)
        else:
            units = tl.load((source_ptrs + source_row * WIDTH)[:, None] + column[None, :], mask=copied)
            tl.store((target_ptr + row * WIDTH)[:, None] + column[None, :], units, mask=copied)


launch_gather = Launcher(gather_kernel, writes=("out_ptr",))


def gather(data: Tensor, layout: PackedLayout, slots: Tensor) -> Tensor:
    """:func:`kvcompile.kernels.spec.gather.gather_tokens` on a GPU.

    A slot outside of the pool fails an assertion on the device.
    """
    batch, num_tokens = slots.shape
    blocks, num_kv_heads = num_blocks(num_tokens), data.shape[2]
    out = torch.empty((blocks, batch, num_kv_heads, layout.block_bytes), dtype=torch.uint8, device=data.device)
    if out.numel():
        launch_gather(
            (blocks * batch * num_kv_heads, 1, 1),
            (data, slots, out),
            (strides_of(data), slots.stride(), strides_of(out)),
            (batch, num_kv_heads, num_tokens, data.shape[0] * BLOCK_TOKENS),
            (gathered_sections(layout, is_reference(data)),),
            {"num_warps": 4, **ASSERTING},
        )
    return out
