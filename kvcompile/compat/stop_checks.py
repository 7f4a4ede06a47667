"""When the loop of ``generate()`` learns that all sequences have ended: after each token, or one step late.

If the host asks the GPU after each token, the GPU is idle until the host has prepared the next step. The class
``DeferredStopCheck`` of Transformers (5.17 to 5.24) reads the answer after it has launched the next step. If all
sequences have ended, this step was one too many, and its token is dropped. Transformers uses the class only on MPS.
Without this private class, requests ask after each token.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

STOPPING_CRITERIA = "_get_stopping_criteria"
"""The method of ``GenerationMixin`` that lists all stopping criteria of a request."""


DEVICES = ("cuda",)
"""The types of devices that compute while the host goes on."""


class StopsLate(Protocol):
    """A request, which decides whether it stops one step late.

    Attributes:
        may_end_early: whether it may end before its greatest length. Otherwise no step is one too many.
    """

    may_end_early: bool

    def stops_late(self, cache: Any, is_returned: bool) -> bool:
        """Whether the request may run one step too many.

        Args:
            cache: the cache of a decoding loop, perhaps the loop of another model.
            is_returned: whether somebody uses the cache after the loop.
        """

    def drop_last_token(self) -> None:
        """Undo the step that was one too many, in a cache that somebody uses after the loop."""


_REQUEST: ContextVar[StopsLate | None] = ContextVar("request", default=None)


@contextmanager
def stopping_late(request: StopsLate) -> Iterator[None]:
    """Inside the ``with`` block, ``request`` decides for the decoding loops of this thread on CUDA devices."""
    _replace_check()
    token = _REQUEST.set(request)
    try:
        yield
    finally:
        _REQUEST.reset(token)


def may_end_early(criteria: Any) -> bool:
    """Whether a request with these stopping criteria may end before its greatest length."""
    return any(type(criterion).__name__ != "MaxLengthCriteria" for criterion in criteria)


@functools.cache
def _replace_check() -> None:
    """Let a subclass take the place of ``DeferredStopCheck``, once for the process.

    The loop finds the class by name in the module. Outside :func:`stopping_late`, the subclass is like the original.
    """
    from transformers.generation import utils

    original: Any = getattr(utils, "DeferredStopCheck", None)
    if original is not None:
        utils.DeferredStopCheck = _check_class(original)  # type: ignore[misc]


def _check_class(original: Any) -> Any:
    class DeferredStopCheck(original):  # type: ignore[misc]
        """A check that also serves the requests of :func:`stopping_late`."""

        @staticmethod
        def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
            late = _is_late(device, cache, cache_is_returned, is_assistant)
            return late or original.is_supported(device, cache, cache_is_returned, is_assistant=is_assistant)

        def __init__(self, input_ids: Any, max_length: int, cache: Any, cache_is_returned: bool, *more: Any) -> None:
            late = _is_late(input_ids.device, cache, cache_is_returned)
            # The request undoes a step in its cache itself, so the original gets no cache to crop.
            super().__init__(input_ids, max_length, cache, cache_is_returned and not late, *more)
            request = _REQUEST.get() if late else None
            may_undo = request is not None and request.may_end_early
            self.undo = request if may_undo and cache_is_returned else None
            self.draws = _Draws(input_ids.device) if may_undo else None

        def __call__(self, *args: Any) -> bool:
            if self.draws is not None:
                self.draws.note()
            return bool(super().__call__(*args))

        def finish(self) -> int:
            steps = int(super().finish())
            if steps and self.draws is not None:
                self.draws.undo()
            if steps and self.undo is not None:
                self.undo.drop_last_token()
            return steps

    return DeferredStopCheck


def _is_late(device: torch.device, cache: Any, is_returned: bool, is_assistant: bool = False) -> bool:
    request = _REQUEST.get()
    if request is None or is_assistant or device.type not in DEVICES:
        return False
    return request.stops_late(cache, is_returned)


class _Draws:
    """Random numbers drawn by the step that was one too many. The next request draws them again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: deque[torch.Tensor] = deque(maxlen=2)

    def note(self) -> None:
        """Note the state of the generator after a token was drawn."""
        self._states.append(torch.cuda.get_rng_state(self._device))

    def undo(self) -> None:
        """Return to the state before the last token was drawn."""
        torch.cuda.set_rng_state(self._states[0], self._device)
