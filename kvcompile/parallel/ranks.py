"""The ranks that save or load one cache together, and their agreement on every error.

Every rank of both groups must call the functions of this file at the same time, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from kvcompile.compat.distributed import group_of
from kvcompile.errors import CacheFileError, one_line
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.parallel.context_parallel import Member, member_of

T = TypeVar("T")

_ALONE = Member(0, 1, "")


@dataclass(frozen=True)
class Ranks:
    """A grid of ranks: the ranks of a row hold different heads, and the ranks of a column hold different tokens.

    Attributes:
        context: this rank among the ranks that divide the tokens.
        tensor: this rank among the ranks that divide the heads.
    """

    context: Member = _ALONE
    tensor: Member = _ALONE

    @classmethod
    def of(cls, context_parallel: Any, tensor_parallel: Any, function: str) -> Ranks | None:
        """The ranks that the two options of ``function`` describe; None if neither is given.

        Raises:
            OptionsError: an option is neither a DeviceMesh of one dimension nor a process group with this process.
        """
        if context_parallel is None and tensor_parallel is None:
            return None
        context = member_of(context_parallel, f"{function}: context_parallel")
        tensor = member_of(tensor_parallel, f"{function}: tensor_parallel")
        return cls(context or _ALONE, tensor or _ALONE)

    @property
    def rank(self) -> int:
        """The number of this rank in the grid, row after row."""
        return self.context.rank * self.tensor.size + self.tensor.rank

    @property
    def size(self) -> int:
        return self.context.size * self.tensor.size

    @property
    def shard(self) -> ContextShard | None:
        """This rank's share of the tokens; None if it has all tokens."""
        return ContextShard(*self.context) if self.context.size > 1 else None

    def name(self, rank: int) -> str:
        """The name of a rank in messages: its place in both groups."""
        places = {"context-parallel": (self.context, rank // self.tensor.size)}
        places["tensor-parallel"] = self.tensor, rank % self.tensor.size
        named = [f"{kind} rank {place}" for kind, (member, place) in places.items() if member.size > 1]
        return ", ".join(named) or f"rank {rank}"

    def gather(self, value: T) -> list[T]:
        """``value`` of all ranks, in the order of their numbers."""
        values: list[Any] = [value]
        for member in (self.tensor, self.context):
            if member.size > 1:
                rows: list[Any] = [None] * member.size
                dist.all_gather_object(rows, values, group=group_of(member.group))
                values = [item for row in rows for item in row]
        return values

    def together(self, function: str, work: Callable[[], T]) -> list[T]:
        """The results of ``work`` of all ranks, or the same error on all of them.

        Raises:
            CacheFileError: ``work`` failed on a rank. A single rank raises its error unchanged.
        """
        if self.size == 1:
            return [work()]
        result: Any = None
        problem: str | None = None
        try:
            result = work()
        except CacheFileError as error:
            problem = str(error)
        except Exception as error:  # every error must reach the other ranks, which would wait for this one
            problem = one_line(f"{type(error).__name__}: {error}")
        outcomes = self.gather((result, problem))
        for rank, (_, text) in enumerate(outcomes):
            if text is not None:
                raise CacheFileError(f"{function}: {self.name(rank)}: {text}")
        return [each for each, _ in outcomes]
