"""A compiled function that ``aot_compile`` stores in a file. Another process runs it without tracing and passes.

PyTorch stores the guards and Dynamo's bytecode. The file also has the code of Inductor with the plan of a call
(:class:`~kvcompile.call.packed_code.PackedCode`), the list of caches that a call packs, and the entry of the report.
The formats are part of all of this, so the policy is not read again. A file from other code of kvcompile, or from
another PyTorch, is refused.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcompile.call.digest import has_only_own_formats
from kvcompile.call.inputs import holds_bytes_of, packed_input
from kvcompile.call.key_outliers import KeyGuard
from kvcompile.call.packed_call import AdoptingCall, adopted_by_input, with_parts
from kvcompile.compat.ahead_of_time import StorableCall, bytes_of, code_of_bytes, is_kept
from kvcompile.errors import OptionsError, PackageError, one_line
from kvcompile.packed.cache_meta import CacheMeta
from kvcompile.packed.code_digest import code_digest
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.calling import GraphInput, InputAction, PackedInput, SplitStack
from kvcompile.passes.graph.names import in_words
from kvcompile.report import report
from kvcompile.report.data import enumerate_modules
from kvcompile.version import VERSION


class StoredCode(StorableCall):
    """Compiled code that ``aot_compile`` can store: a graph without packed attention, whose inputs may be packed."""

    def __init__(self, compiled: Callable[..., Any], inductor_config: dict[str, Any]) -> None:
        """
        Args:
            compiled: the result of ``compile_fx``.
            inductor_config: the settings of Inductor with which it was compiled.

        Raises:
            OptionsError: PyTorch has kept no code.
        """
        if not is_kept(compiled):
            raise OptionsError(
                "aot_compile cannot store this step, because AOTAutograd keeps no code of it; compile it with "
                "torch.compile, or store it with kvcompile.package"
            )
        self._compiled, self._inductor_config = compiled, inductor_config

    def __call__(self, *args: Any) -> Any:  # type: ignore[override]
        return self._compiled(*args)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        """The arguments of :meth:`_of`, without the code."""
        return ()

    @classmethod
    def _of(cls, compiled: Callable[..., Any], inductor_config: dict[str, Any]) -> StoredCode:
        """The function that is loaded."""
        return cls(compiled, inductor_config)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """The bytes of a function; PyTorch calls this to save it.

        Raises:
            PackageError: a setting of Inductor cannot be stored.
        """
        try:
            arguments = pickle.dumps((fn._inductor_config, *fn._arguments))
        except Exception as error:
            raise PackageError(
                f"the compiled function cannot be stored: {one_line(error)}; pass options of Inductor that can be "
                "pickled"
            ) from error
        return pickle.dumps((_made_with(), arguments, bytes_of(fn._compiled)))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> StoredCode:
        """The function that was saved; PyTorch calls this to load it.

        Raises:
            PackageError: other code made the file.
        """
        made_with, arguments, compiled = pickle.loads(data)
        if made_with != _made_with():
            raise PackageError(
                f"the compiled function was stored with {made_with}, and this process has {_made_with()}; call "
                "aot_compile and save_compiled_function again"
            )
        inductor_config, *others = pickle.loads(arguments)
        return cls._of(code_of_bytes(compiled, inductor_config), inductor_config, *others)


@dataclass(frozen=True)
class CallParts:
    """The data of a call besides the compiled code. It can be pickled.

    Attributes:
        caches: the caches that a call must pack, with their positions among Dynamo's inputs.
        stacks: the inputs that a call splits.
        sources: the user's name of each cache.
        conceals: whether packed caches are concealed from AOTAutograd.
        looks_at_keys: whether the first call looks for outlier keys.
    """

    caches: tuple[InputAction, ...]
    stacks: tuple[SplitStack, ...]
    sources: tuple[str, ...]
    conceals: bool
    looks_at_keys: bool


class StoredCall(StoredCode):
    """An :class:`AdoptingCall` that ``aot_compile`` can store."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        inductor_config: dict[str, Any],
        parts: CallParts,
        graph: report.GraphReport,
    ) -> None:
        """
        Args:
            compiled: the result of ``compile_fx`` for the packed graph.
            inductor_config: the settings of Inductor with which it was compiled.
            parts: the data of a call besides the code.
            graph: the graph's entry in the report.

        Raises:
            OptionsError: PyTorch has kept no code.
        """
        super().__init__(compiled, inductor_config)
        self._parts, self._graph = parts, graph
        guard = KeyGuard(parts.caches, parts.sources, graph.sites, report.note) if parts.looks_at_keys else None
        # Nothing is traced later, so there is no plain code for a cache that cannot be packed.
        self._call = AdoptingCall(compiled, parts.caches, parts.stacks, None, graph, guard, parts.conceals)
        self._known: dict[int, CacheMeta] = {}

    def __call__(self, *args: Any) -> Any:  # type: ignore[override]
        self._check_formats(args)
        return self._call(*args)

    def _check_formats(self, args: Sequence[Any]) -> None:
        """Raise PackageError if a packed cache among the inputs has another format than the code reads.

        Dynamo guards the format. However, Dynamo cannot store every guard, so users pass functions that drop guards.
        """
        values = with_parts(args, self._parts.stacks) if self._parts.stacks else args
        for action, source in zip(self._parts.caches, self._parts.sources, strict=True):
            value = values[action.index]
            if type(value) is PackedTensor and value.cache_meta is self._known.get(action.index) and value.is_whole:
                continue
            if not isinstance(value, PackedSubclass):
                continue  # the call packs a plain cache in the right format
            found = packed_input(value)
            if found is None or not holds_bytes_of(found, action):
                raise PackageError(
                    f"{in_words(source) or source}: the stored function takes a cache in {_in_words(action)}, not "
                    f"{'this view of a packed cache' if found is None else _in_words(found)}; make a function "
                    "for it with aot_compile"
                )
            if type(value) is PackedTensor:
                self._known[action.index] = value.cache_meta

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self._parts, replace(self._graph, passes={})  # they do not run where the function is loaded

    @classmethod
    def _of(  # type: ignore[override]
        cls,
        compiled: Callable[..., Any],
        inductor_config: dict[str, Any],
        parts: CallParts,
        known: report.GraphReport,
    ) -> StoredCall:
        """The function that is loaded. The report of this process gets its graph."""
        graph = report.record(known.sites, known.surroundings, known.weights, {}, known.origin, known.verified_steps)
        return cls(compiled, inductor_config, parts, graph)


def _in_words(cache: PackedInput | InputAction) -> str:
    return f"{cache.layout.description} for {cache.layout.role}s [{cache.axes}]"


@functools.cache
def _made_with() -> str:
    """The code that a stored function depends on. PyTorch itself checks Python, Triton and the device."""
    return f"kvcompile {VERSION} ({code_digest()}) and PyTorch {torch.__version__}"


def note_plain_caches(parts: CallParts, inputs: Sequence[GraphInput]) -> None:
    """Say that a function serves plain caches once, because its first call packs them.

    Args:
        parts: the data of a call of the function.
        inputs: the record of the inputs of the graph.
    """
    adopted = adopted_by_input(parts.caches, parts.stacks)
    plain = [known.source for known in inputs if known.dynamo_index in adopted and not known.arrives_packed]
    if plain:
        report.note(
            f"aot_compile was given plain caches ({enumerate_modules([in_words(name) or name for name in plain])}): "
            "the first call of the function packs them, and its guards refuse packed caches in later calls; give "
            "aot_compile packed caches, or make a second function after the first call"
        )


def check_storable(is_divided: bool) -> None:
    """Raise OptionsError if ``aot_compile`` cannot store the code of a graph.

    Args:
        is_divided: whether the graph takes shards of tensors that several ranks hold together.
    """
    if is_divided:
        raise OptionsError(
            "aot_compile cannot store a step of several ranks, whose process groups exist only in its process; "
            "compile it with torch.compile on each rank"
        )
    if not has_only_own_formats():
        raise OptionsError(
            "aot_compile cannot store a step while formats of other packages are registered, because it could not "
            "notice that their code has changed; compile it with torch.compile"
        )
