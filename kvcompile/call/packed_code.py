"""The compiled code of a rewritten graph, in a form that AOTAutograd's cache stores.

A process that finds the entry runs no pass and traces no ATen graph. The entry has the key of Inductor's code in
Inductor's own cache, the plan of a call (:class:`~kvcompile.call.packed_call.CallPlan`), and the outcome of the passes
for the report. The digest of :mod:`kvcompile.call.digest` in the key excludes stale entries. For ``aot_compile`` the
entry has the code itself in place of the key, and the bases of calibrated formats (:mod:`kvcompile.call.stored_call`).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcompile.call.packed_call import CallPlan, PackedCall
from kvcompile.compat.ahead_of_time import entry_with_code
from kvcompile.compat.autograd_cache import NotStored, StoredCode, entry_in_inductors_cache
from kvcompile.compat.inductor import BoxedBool
from kvcompile.kernels.formats import bases
from kvcompile.passes.calling import InputAction, SplitStack
from kvcompile.passes.notes.surroundings import SiteSurroundings
from kvcompile.passes.site import Site


@dataclass(frozen=True)
class Outcome:
    """The decisions of the passes on one graph, for the report and for the call of Dynamo.

    Attributes:
        sites: the attention sites, with their decisions.
        surroundings: the nodes around each site.
        caches: the caches that a call must pack, with their positions among Dynamo's inputs.
        stacks: the inputs that a call splits, with their positions among Dynamo's inputs.
        sources: the user's name of each cache.
        unpacked: the packed inputs of Dynamo's graph whose tokens it moves although their formats cannot.
        is_recordable_step: whether the graph is a decode step that a CUDA graph could replay, and that runs without one
            now.
    """

    sites: tuple[Site, ...]
    surroundings: tuple[SiteSurroundings, ...]
    caches: tuple[InputAction, ...]
    stacks: tuple[SplitStack, ...]
    sources: tuple[str, ...]
    unpacked: tuple[int, ...]
    is_recordable_step: bool


_RECEIVER: ContextVar[Callable[[Outcome], None] | None] = ContextVar("receiver_of_outcomes", default=None)


@contextlib.contextmanager
def receiving_outcomes(receiver: Callable[[Outcome], None]) -> Iterator[None]:
    """Inside the ``with`` block, ``receiver`` gets the outcome of code that is loaded from AOTAutograd's cache."""
    token = _RECEIVER.set(receiver)
    try:
        yield
    finally:
        _RECEIVER.reset(token)


class PackedCode(StoredCode):
    """A :class:`~kvcompile.call.packed_call.PackedCall` that AOTAutograd's cache can store.

    It has the methods of PyTorch's ``OutputCode`` (``torch/_inductor/output_code.py``).
    """

    def __init__(
        self, compiled: Any, plan: CallPlan, outcome: Outcome, cudagraphs: bool, keeps_code: bool = False
    ) -> None:
        """
        Args:
            compiled: Inductor's code of the rewritten graph.
            plan: the work of a call before and after the code.
            outcome: the decisions of the passes.
            cudagraphs: whether Inductor may record the code as a CUDA graph.
            keeps_code: whether the stored entry needs neither Inductor's cache nor the files of the policy.
        """
        super().__init__()
        self._boxed_call = True  # set on the object, because AOTAutograd's wrapper takes over its attributes
        self._outcome, self._plan, self._cudagraphs = outcome, plan, cudagraphs
        self._keeps_code = keeps_code
        self._bases: list[dict[str, Tensor]] = []
        self._compiled: Any = compiled
        self._call: Any = PackedCall(compiled, plan)
        self._entry: Any = None

    def __call__(self, inputs: Any) -> Any:
        return self._call(inputs)

    def prepare_for_serialization(self) -> None:
        """Drop the attributes that cannot be pickled; PyTorch calls this on a shallow copy.

        Raises:
            NotStored: Inductor's cache does not have the compiled graph, or the outcome cannot be pickled.
        """
        if self._keeps_code:
            self._entry, self._bases = entry_with_code(self._compiled), _bases_of(self._plan)
        else:
            self._entry = entry_in_inductors_cache(self._compiled)
        try:
            pickle.dumps((self._plan, self._outcome))
        except Exception as error:
            raise NotStored(f"the plan of a call cannot be pickled: {error}") from error
        self._compiled = self._call = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Load Inductor's code. PyTorch calls this only on code from its cache, not after a compilation.

        ``example_inputs`` are the inputs before stacks were split; Inductor reads only their symbols and devices.
        """
        for tensors in self._bases:
            bases.register(bases.Basis(**tensors))
        graph_kwargs = {**graph_kwargs, "cudagraphs": BoxedBool(bool(graph_kwargs["cudagraphs"]) and self._cudagraphs)}
        compiled = self._entry.load(example_inputs)
        self._call = PackedCall(self._entry.post_compile(compiled, graph_kwargs), self._plan)
        receiver = _RECEIVER.get()
        if receiver is not None:
            receiver(self._outcome)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Inductor's own entry holds the bundle."""


def _bases_of(plan: CallPlan) -> list[dict[str, Tensor]]:
    """The tensors of the bases of all packed caches that a call takes or returns."""
    layouts = [*(action.layout for action in plan.caches), *(action.layout for action, _ in plan.outputs)]
    references = {layout.format.basis[: bases.DIGEST_DIGITS] for layout in layouts if layout.format.basis}
    return [bases.root(reference) for reference in sorted(references)]


def without_symbols(actions: Sequence[InputAction]) -> tuple[InputAction, ...]:
    """``actions`` without symbolic sizes, which belong to one compilation."""
    return tuple(action.without_symbols for action in actions)
