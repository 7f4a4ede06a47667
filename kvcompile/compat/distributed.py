"""Private names of process groups and DTensors. Several GPUs need them; there is no fallback."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """``x`` of all ranks of a group, concatenated along the first dimension. Traced graphs contain this collective."""
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x, size, group))  # type: ignore[no-any-return]


def local_shard(x: Any) -> Tensor:
    """The shard of a DTensor that this process holds. ``to_local`` makes a view of it, which takes longer."""
    return x._local_tensor  # type: ignore[no-any-return]


def group_name(group: Any) -> str:
    """The name by which functional collectives find a process group."""
    return str(group.group_name)


def group_of(name: str) -> Any:
    """The process group with this name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]


def store_of(group: Any) -> Any:
    """The ``torch.distributed.Store`` that the ranks of a process group share, with a namespace for this group."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)
