"""One rank's part of a packed cache whose tokens are divided among the ranks of a group (context parallelism).

A ``PackedShard`` looks like the whole cache. Compiled graphs read and write only the tokens of their rank. Eager code
follows the general rules: a read gathers the values from all ranks, and a write stores the vectors of this rank that
changed. All ranks must run the same eager code at the same time, because it runs collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.distributed import all_gather
from kvcompile.compat.tensors import new_wrapper
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.op_table import handles
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor

aten = torch.ops.aten


class PackedShard(PackedSubclass):
    """A cache of fixed size whose tokens are divided among ranks. This process holds the tokens of its rank.

    Attributes:
        local: the tokens of this rank, with the axes of the whole cache.
        shard: the positions of these tokens in the whole cache.
    """

    local: PackedTensor
    shard: ContextShard

    @staticmethod
    def __new__(cls, local: PackedTensor, size: Sequence[int], shard: ContextShard) -> PackedShard:
        """A cache of logical ``size`` that shares the storage of ``local``."""
        return new_wrapper(cls, size, dtype=local.dtype, device=local.device)

    def __init__(self, local: PackedTensor, size: Sequence[int], shard: ContextShard) -> None:
        self.local = local
        self.shard = shard

    @classmethod
    def zeros(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: PackedLayout,
        shard: ContextShard,
        axes: str = "bhtd",
        device: torch.device | str | None = None,
    ) -> PackedShard:
        """A cache of zeros of logical ``shape``, in the order ``axes``.

        Args:
            shape: the shape of the whole cache.
            dtype: the logical dtype.
            layout: format and role, without a residual and not calibrated.
            shard: this rank's share of the tokens.
            axes: as in :meth:`PackedTensor.from_dense`.
            device: the device of the data.

        Raises:
            ValueError: the layout has a residual or is calibrated, or it cannot hold this cache.
        """
        if layout.why_not_split is not None:
            raise ValueError(
                f"ranks cannot split this cache: {layout.why_not_split}; choose a format that is not calibrated, "
                "without residual_length and sink_tokens"
            )
        own = list(shape)
        own[axes.index("t")] = shard.num_tokens(shape[axes.index("t")])
        return cls(PackedTensor.zeros(own, dtype, layout, axes, device), shape, shard)

    @classmethod
    def from_dense(cls, x: Tensor, layout: PackedLayout, shard: ContextShard, axes: str = "bhtd") -> PackedShard:
        """Quantizes this rank's tokens of a plain cache ``x``. Arguments and errors are as in :meth:`zeros`."""
        result = cls.zeros(x.shape, x.dtype, layout, shard, axes, x.device)
        dim = result.local.token_dim
        own = shard.select(x.detach(), dim).narrow(dim, 0, shard.owned_tokens(x.shape[dim]))
        packed = PackedTensor.from_dense(own, layout, axes).packed
        result.local.packed[: packed.shape[0]].copy_(packed)  # the remaining bytes are zero, as without ranks
        return result

    @property
    def data_is_traced(self) -> bool:
        return self.local.data_is_traced

    def dequantize(self) -> Tensor:
        """The values of all ranks. Every rank of the group must call it at the same time."""
        own = self.local.dequantize().contiguous()
        gathered = all_gather(own, self.shard.size, self.shard.group)
        parts = gathered.unflatten(0, (self.shard.size, own.shape[0]))
        dim = self.local.token_dim
        return self.shard.join(parts, dim, self.shape[dim]).contiguous()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["local"], self.shard

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> PackedShard:
        local = inner["local"]
        assert isinstance(local, PackedTensor)
        return PackedShard(local, size, context)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedShard(shape={tuple(self.shape)}, rank={self.shard.rank} of {self.shard.size}, {self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "a part of a packed cache cannot be pickled, because its process group belongs to this process; call "
            "kvcompile.save_cache(..., context_parallel=...) on all ranks"
        )


@handles(PackedShard, aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(cache: PackedShard) -> PackedShard:
    return _with_local(cache, aten.alias.default(cache.local))


@handles(PackedShard, aten.clone.default)
def _clone(cache: PackedShard, **kwargs: Any) -> PackedShard:
    return _with_local(cache, cache.local.clone())


@handles(PackedShard, aten.zero_.default)
def _zero_(cache: PackedShard) -> PackedShard:
    cache.local.zero_()
    return cache


def _with_local(cache: PackedShard, local: Any) -> PackedShard:
    assert isinstance(local, PackedTensor), "a view or copy of whole tokens is packed"
    return PackedShard(local, cache.shape, cache.shard)
