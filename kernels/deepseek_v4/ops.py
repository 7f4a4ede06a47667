"""The operators ``kvcompile::quantize_and_insert_k_cache`` and ``kvcompile::dequantize_and_gather_k_cache``.

The functions of the same names in :mod:`kvcompile.kernels.formats.ds_mla_rows` specify them, and run on a CPU.
Triton kernels that agree bit for bit run on a GPU. Each operator changes one argument in place, the cache or ``out``,
and returns nothing. Tensors that do not fit raise a ValueError that names the argument. Slots, lengths and
page numbers are data on the device. On a CPU, wrong values raise a ValueError before anything is written. On a GPU they
fail an assertion, like a wrong index in PyTorch.

Importing this module needs neither Triton nor a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.deepseek_v4 import kernels
from kvcompile.kernels.formats import ds_mla_rows as spec
from kvcompile.kernels.lang.gpus import why_unsupported

INTEGERS = (torch.int32, torch.int64)
PAGE_ALIGNMENT = 8
"""The alignment of pages in bytes. It divides TOKEN_BYTES, so that contiguous pages of any size are aligned."""

INSERT = "kvcompile::quantize_and_insert_k_cache"
GATHER = "kvcompile::dequantize_and_gather_k_cache"

_library = torch.library.Library("kvcompile", "FRAGMENT")
_library.define(
    "quantize_and_insert_k_cache(Tensor k, Tensor(a!) k_cache, Tensor slot_mapping, int block_size) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "dequantize_and_gather_k_cache(Tensor(a!) out, Tensor k_cache, Tensor seq_lens, Tensor? gather_lens, "
    "Tensor block_table, int block_size, SymInt offset) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)


def _unfit(op: str, name: str, wanted: str, tensor: Tensor) -> ValueError:
    return ValueError(
        f"{op}: {name} must be {wanted}, but is {tensor.dtype} {list(tensor.shape)} with strides "
        f"{list(tensor.stride())} on {tensor.device}"
    )


def _check_cache(op: str, k_cache: Tensor, block_size: int) -> None:
    """Raise ValueError unless ``k_cache`` has pages of ``block_size`` tokens; kernels do not check it again."""
    if (reason := why_unsupported(k_cache.device)) is not None:
        raise ValueError(f"{op}: {reason}; use another GPU, or tensors on a CPU")
    if block_size < 1:
        raise ValueError(f"{op}: block_size must be at least 1, but is {block_size}")
    page_bytes = block_size * spec.TOKEN_BYTES
    shape, strides = k_cache.shape, k_cache.stride()
    contiguous = strides[-1:] == (1,) and (len(shape) == 2 or block_size == 1 or strides[1:2] == (spec.TOKEN_BYTES,))
    apart = shape[:1] == (1,) or (strides[0] >= page_bytes and strides[0] % PAGE_ALIGNMENT == 0)
    if (
        k_cache.dtype != torch.uint8
        or shape[1:] not in ((block_size, spec.TOKEN_BYTES), (page_bytes,))
        or not (contiguous and apart)
    ):
        wanted = (
            f"uint8 [num_blocks, {block_size}, {spec.TOKEN_BYTES}] or [num_blocks, {page_bytes}], the pages contiguous "
            f"and a multiple of {PAGE_ALIGNMENT} bytes apart"
        )
        raise _unfit(op, "k_cache", wanted, k_cache)
    if k_cache.data_ptr() % PAGE_ALIGNMENT:
        raise ValueError(f"{op}: k_cache starts at an address that is not a multiple of {PAGE_ALIGNMENT} bytes")


def _check_insert(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    _check_cache(INSERT, k_cache, block_size)
    device = k_cache.device
    if k.dtype != torch.bfloat16 or k.dim() != 2 or k.shape[1] != spec.HEAD_DIM or k.device != device:
        raise _unfit(INSERT, "k", f"bfloat16 [num_tokens, {spec.HEAD_DIM}] on {device}", k)
    if (
        slot_mapping.dtype not in INTEGERS
        or slot_mapping.dim() != 1
        or slot_mapping.shape[0] > k.shape[0]
        or slot_mapping.device != device
    ):
        wanted = f"int32 or int64 [at most {k.shape[0]}], one per token of k, on {device}"
        raise _unfit(INSERT, "slot_mapping", wanted, slot_mapping)


def _check_gather(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
) -> None:
    _check_cache(GATHER, k_cache, block_size)
    device = k_cache.device
    if seq_lens.dtype not in INTEGERS or seq_lens.dim() != 1 or seq_lens.device != device:
        raise _unfit(GATHER, "seq_lens", f"int32 or int64 [num_reqs] on {device}", seq_lens)
    num_reqs = seq_lens.shape[0]
    if gather_lens is not None and (
        gather_lens.dtype not in INTEGERS or gather_lens.shape != seq_lens.shape or gather_lens.device != device
    ):
        raise _unfit(GATHER, "gather_lens", f"int32 or int64 [{num_reqs}], like seq_lens, on {device}", gather_lens)
    if (
        block_table.dtype not in INTEGERS
        or block_table.dim() != 2
        or block_table.shape[0] < num_reqs
        or block_table.device != device
    ):
        wanted = f"int32 or int64 [at least {num_reqs}, max_blocks_per_seq] on {device}"
        raise _unfit(GATHER, "block_table", wanted, block_table)
    if (
        out.dtype != torch.bfloat16
        or out.dim() != 3
        or out.shape[0] < num_reqs
        or out.shape[2] != spec.HEAD_DIM
        or out.device != device
        or any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True))
    ):
        wanted = f"bfloat16 [at least {num_reqs}, max_num_tokens, {spec.HEAD_DIM}], not expanded, on {device}"
        raise _unfit(GATHER, "out", wanted, out)
    if not 0 <= offset <= out.shape[1]:
        raise ValueError(f"{GATHER}: offset {offset} is not within the {out.shape[1]} rows of out")


def _check_slots(k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    """Raise ValueError unless every slot is in the cache. This reads the tensor."""
    num_slots = k_cache.shape[0] * block_size
    if slot_mapping.numel() and slot_mapping.max() >= num_slots:
        raise ValueError(
            f"{INSERT}: slot_mapping has the slot {slot_mapping.max()}, but k_cache has {num_slots}: "
            f"{k_cache.shape[0]} pages of {block_size} tokens"
        )


def _check_requests(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
) -> None:
    """Raise ValueError unless every request fits ``out`` and its pages are in the cache. This reads the tensors."""
    num_rows, num_blocks = out.shape[1] - offset, k_cache.shape[0]
    gathered = seq_lens if gather_lens is None else gather_lens
    for req, (seq_len, gather_len) in enumerate(zip(seq_lens.tolist(), gathered.tolist(), strict=True)):
        if gather_len == 0:
            continue
        if not 0 < gather_len <= min(seq_len, num_rows) or seq_len > block_table.shape[1] * block_size:
            raise ValueError(
                f"{GATHER}: request {req} cannot gather {gather_len} of {seq_len} tokens: out has {num_rows} rows from "
                f"offset {offset} on, and block_table has {block_table.shape[1]} pages of {block_size} tokens per "
                f"request"
            )
        pages = block_table[req, (seq_len - gather_len) // block_size : -(-seq_len // block_size)]
        if pages.min() < 0 or pages.max() >= num_blocks:
            raise ValueError(
                f"{GATHER}: the pages of request {req} in block_table range from {pages.min()} to {pages.max()}, but "
                f"k_cache has {num_blocks}"
            )


def _insert(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    _check_insert(k, k_cache, slot_mapping, block_size)
    if k_cache.is_cuda:
        kernels.quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size)
    else:
        _check_slots(k_cache, slot_mapping, block_size)
        spec.quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size)


def _gather(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
) -> None:
    arguments = out, k_cache, seq_lens, gather_lens, block_table, block_size, offset
    _check_gather(*arguments)
    if out.is_cuda:
        kernels.dequantize_and_gather_k_cache(*arguments)
    else:
        _check_requests(*arguments)
        spec.dequantize_and_gather_k_cache(*arguments)


def _fake(*arguments: object) -> None:
    return None


for _device in ("CPU", "CUDA"):
    _library.impl("quantize_and_insert_k_cache", _insert, _device)
    _library.impl("dequantize_and_gather_k_cache", _gather, _device)
for _op in (INSERT, GATHER):
    torch.library.register_fake(_op, _fake, lib=_library)
