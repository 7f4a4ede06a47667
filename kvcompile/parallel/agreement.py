"""Agreement between ranks on the outcome of each joint step: the compilation of a graph, or the split of plain caches.

Every rank writes its outcome to the key-value store of its process group, and reads the outcomes of the others. No
collective runs, so a rank that fails leaves no other rank in a collective. The store of ``torch.distributed`` serves
every backend. A rank waits for the others until the timeout of ``init_process_group`` has passed.

The outcomes of a group are numbered. A rank that fails writes its error under the next number, where the other ranks
read it. A rank whose program ends with an error elsewhere writes this error when it exits.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from kvcompile.compat.distributed import group_of, store_of
from kvcompile.errors import KVCompileError, cut
from kvcompile.kernels.layout.context_shard import ContextShard

T = TypeVar("T")

_ENDED = "ended"
_POLL_SECONDS = 0.02
_MOST = 200
"""The number of characters of an error that other ranks show."""


class RankError(KVCompileError):
    """Another rank has failed, decided otherwise, or not answered; the message names the rank and its error."""


class Agreement:
    """The outcomes of one step of all ranks.

    Attributes:
        rank: the number of this rank.
    """

    def __init__(self, shard: ContextShard) -> None:
        self.rank = shard.rank
        self._channel = _channel_of(shard)
        self._is_settled = False

    def exchange(self, value: Any) -> list[Any]:
        """The values that all ranks pass, in the order of the ranks. JSON must be able to represent ``value``.

        Raises:
            RankError: another rank has failed, or has not answered in time.
        """
        try:
            return self._channel.exchange(value)
        except RankError:
            self._is_settled = True  # the other ranks learn of the error in the same exchange
            raise

    def differs(self, message: str) -> RankError:
        """The error for outcomes that differ between ranks. All ranks see the difference, so none sends it."""
        self._is_settled = True
        return RankError(message)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank has failed, unless they already know it."""
        if not self._is_settled:
            self._is_settled = True
            with suppress(RuntimeError):  # the store ended with the rank that held it
                self._channel.write({"error": text_of(error)})


def take_part(shard: ContextShard) -> None:
    """Arrange that the other ranks are told if an error ends the program of this rank."""
    _channel_of(shard)


def together(shard: ContextShard, work: Callable[[], T]) -> T:
    """The result of ``work``, or an error on every rank if one of them fails.

    Raises:
        RankError: another rank has failed, or has not answered in time.
        Exception: ``work`` has failed on this rank.
    """
    agreement = Agreement(shard)
    try:
        result = work()
    except Exception as error:
        agreement.fail(error)
        raise
    agreement.exchange(None)
    return result


def text_of(error: BaseException) -> str:
    """The type and the message of an error in one line, for the messages of other ranks."""
    message = " ".join(str(error)[:2000].split())
    return cut(f"{type(error).__name__}: {message}", _MOST)


class _Channel:
    """The numbered outcomes of one process group."""

    def __init__(self, group: Any, shard: ContextShard) -> None:
        self.group = group
        self._store = dist.PrefixStore("kvcompile", store_of(group))
        self._seconds = store_of(group).timeout.total_seconds()
        self._shard = shard
        self._number = 0

    def write(self, outcome: dict[str, Any]) -> int:
        """Write the next outcome of this rank; returns its number."""
        number, self._number = self._number, self._number + 1
        self._store.set(_key(number, self._shard.rank), json.dumps(outcome))
        return number

    def exchange(self, value: Any) -> list[Any]:
        number = self.write({"value": value})
        keys = [_key(number, rank) for rank in range(self._shard.size)]
        self._wait(keys)
        outcomes = [json.loads(self._store.get(key)) for key in keys]
        for rank, outcome in enumerate(outcomes):
            if "error" in outcome:
                raise RankError(f"context_parallel: rank {rank} failed: {outcome['error']}")
        return [outcome["value"] for outcome in outcomes]

    def _wait(self, keys: list[str]) -> None:
        deadline = time.monotonic() + self._seconds
        while not self._store.check(keys):
            self._check_ended()
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._store.check([key]))
                what = f"waited {self._seconds:g} s (the timeout of the process group) for rank {missing}"
                self.end(f"rank {self._shard.rank} {what}")
                raise RankError(
                    f"context_parallel: {what}, which failed elsewhere or runs other code; look for its own error, and "
                    "let all ranks make the same calls"
                )
            time.sleep(_POLL_SECONDS)
        self._check_ended()

    def _check_ended(self) -> None:
        if self._store.check([_ENDED]):
            raise RankError(f"context_parallel: {self._store.get(_ENDED).decode()}")

    def end(self, message: str) -> None:
        """Let every later exchange of the group fail with ``message``. Only the first call has an effect."""
        self._store.compare_set(_ENDED, "", message)

    def end_with_program(self) -> None:
        """Tell the other ranks of the error that ends the program of this rank, if there is one."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            with suppress(RuntimeError):
                self.end(f"rank {self._shard.rank} ended: {text_of(error)}")


_lock = threading.Lock()
_channels: dict[str, _Channel] = {}


def _channel_of(shard: ContextShard) -> _Channel:
    group = group_of(shard.group)
    with _lock:
        channel = _channels.get(shard.group)
        if channel is None or channel.group is not group:  # a new group may get the name of a destroyed group
            channel = _channels[shard.group] = _Channel(group, shard)
            atexit.register(channel.end_with_program)
        return channel


def _key(number: int, rank: int) -> str:
    return f"{number}/{rank}"
