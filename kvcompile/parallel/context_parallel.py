"""Context parallelism: the option ``context_parallel``, and the check that all ranks pack the same attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from kvcompile.compat.distributed import group_name
from kvcompile.errors import OptionsError, shown
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.parallel.agreement import Agreement, take_part
from kvcompile.passes.site import Site


def shard_of(ranks: Any) -> ContextShard | None:
    """This process's share of the tokens of every cache.

    Args:
        ranks: a DeviceMesh of one dimension, such as ``mesh["cp"]``, or a process group; None for one process.

    Returns:
        The shard of this process; None if there is only one process.

    Raises:
        OptionsError: ``ranks`` has another type or several dimensions, or does not contain this process.
    """
    member = member_of(ranks, "option context_parallel")
    if member is None or member.size == 1:
        return None
    shard = ContextShard(*member)
    take_part(shard)
    return shard


class Member(NamedTuple):
    """This process in a group: its ``rank``, the ``size`` of the group, and the name of the ``group``."""

    rank: int
    size: int
    group: str


def member_of(ranks: Any, option: str) -> Member | None:
    """This process in ``ranks``, a DeviceMesh of one dimension or a process group; None if ``ranks`` is None.

    Raises:
        OptionsError: as for :func:`shard_of`; the message begins with ``option``.
    """
    if ranks is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise OptionsError(f"{option}: no process group is initialised; start the program with torchrun")
    group = ranks
    if hasattr(ranks, "mesh_dim_names"):
        if ranks.ndim != 1:
            raise OptionsError(f"{option}: the mesh has {ranks.ndim} dimensions; select one, such as mesh['cp']")
        group = ranks.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise OptionsError(f"{option}: expected a DeviceMesh or a process group, got {shown(ranks)}")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise OptionsError(f"{option}: this process is not in the group; give a group that contains it")
    return Member(rank, size, group_name(group))


def check_agreement(agreement: Agreement, sites: Sequence[Site]) -> None:
    """Check that all ranks pack the same attention; otherwise their collectives would deadlock.

    Every rank of the group must call it for the same graph.

    Raises:
        RankError: another rank has decided otherwise, has failed, or has not answered in time.
    """
    mine = [[site.module, site.reason] for site in sites]
    for rank, theirs in enumerate(agreement.exchange(mine)):
        if theirs != mine:
            ours, other = (first_difference(*pair) for pair in ((mine, theirs), (theirs, mine)))
            raise agreement.differs(
                f"context_parallel: rank {agreement.rank} and rank {rank} disagree: {ours} here, {other} there; give "
                "all ranks the same model, policy, inputs and versions"
            )


def first_difference(sites: Sequence[list[str | None]], others: Sequence[list[str | None]]) -> str:
    """The decision in ``sites`` at the first site where ``others`` has another decision, as text for a message."""
    for index, (module, reason) in enumerate(sites):
        if index >= len(others) or others[index] != [module, reason]:
            return f"attention in {module or 'no module'} is {'packed' if reason is None else f'refused ({reason})'}"
    return f"there are {len(sites)} sites"
