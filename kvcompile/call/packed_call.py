"""Calls of a compiled graph with packed caches: the run-time work before and after the compiled code.

There are two layers, the outer one first:

:class:`AdoptingCall` runs before AOTAutograd's own wrapper, and sees the user's tensors. It quantizes a plain cache and
swaps it in place, so the caller's object is packed from then on. If the swap is impossible (for example because a view
of the cache is alive), plain Inductor runs the call, and the report says so.

:class:`PackedCall` runs inside AOTAutograd's wrapper. It replaces packed caches by their data, reserves space in
growing caches, and wraps new packed data that the graph returns. If a graph does not use a packed tensor as a KV cache,
the graph gets its dequantized values. After the call, only the vectors that the graph changed are quantized, as in
eager code. Inside the graph, changed vectors are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcompile.call.adjacent_parameters import AdjacentParameters
from kvcompile.call.adoption import AdoptionError, adopt, adopt_stack, check_adoptable
from kvcompile.call.fixed_inputs import FixedInputs, KnownCaches
from kvcompile.call.inputs import Concealed, revealed
from kvcompile.call.key_outliers import KeyGuard
from kvcompile.call.leftovers import Leftovers
from kvcompile.call.recent_tokens import asks_for_written, num_written
from kvcompile.call.shards import LocalShards
from kvcompile.call.shared_memory import PlainInputs, check_distinct
from kvcompile.call.sizes import SizeOfCall, SizeReader
from kvcompile.compat.tensors import copy_each
from kvcompile.errors import one_line
from kvcompile.kernels.layout.axes import PartIndex, shape_of_part, without_ranges
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.packed.in_place import store_changes
from kvcompile.packed.pool import PackedPool, slots_of
from kvcompile.packed.shard import PackedShard
from kvcompile.packed.stack import PackedParts, PackedRanges, PackedStack, stacked
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.view_geometry import strided_as
from kvcompile.packed.writes import ROOM
from kvcompile.parallel.agreement import together
from kvcompile.passes.calling import InputAction, JoinedOutput, OutputAction, Rewritten, SplitStack
from kvcompile.report import report


@dataclass(frozen=True)
class DequantizedInput:
    """Input ``index`` of a compiled graph may be a packed tensor, and the graph takes its dequantized values.

    Attributes:
        index: position among the graph's inputs.
        mutated: whether the graph changes the values.
    """

    index: int
    mutated: bool


@dataclass(frozen=True)
class CallPlan:
    """The work before and after the compiled code of a rewritten graph in each call. It can be pickled.

    Attributes:
        caches: the actions for packed caches among the inputs.
        made: the caches from which the call makes a new cache, with the numbers of new tokens and of sequences.
        outputs: the packed caches among the outputs, with their logical shapes.
        dequantized: the packed inputs that the graph takes as plain values. A call may have unpacked them before.
        by_reference: whether packed data is passed as references.
        buffered_inputs: the inputs that the graph changes in a buffer at a fixed address.
        stacks: the inputs that are split into parts.
        plain: the plain inputs of a graph in which a stack has plain parts; None without such parts.
        conceals: whether packed caches arrive as :class:`Concealed` tensors.
        adjacent: the inputs whose place a tensor with several parameters takes, as in :class:`Rewritten`.
    """

    caches: tuple[InputAction, ...]
    made: tuple[tuple[InputAction, SizeOfCall, SizeOfCall | None], ...]
    outputs: tuple[tuple[OutputAction, tuple[SizeOfCall, ...]], ...]
    dequantized: tuple[DequantizedInput, ...] = ()
    by_reference: bool = False
    buffered_inputs: tuple[int, ...] = ()
    stacks: tuple[SplitStack, ...] = ()
    conceals: bool = False
    adjacent: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    plain: PlainInputs | None = None

    @classmethod
    def of(
        cls,
        rewritten: Rewritten,
        example_inputs: Sequence[Any],
        dequantized: Sequence[DequantizedInput] = (),
        conceals: bool = False,
        mutated: Iterable[int] = (),
    ) -> CallPlan:
        """The plan for a rewritten graph, whose fake inputs were ``example_inputs`` before stacks were split.

        ``mutated`` are the positions of all inputs that the graph changes, after the split.
        """
        sizes = SizeReader(example_inputs)
        caches = tuple(_action_of_call(action) for action in rewritten.inputs)
        made = (
            (
                action,
                sizes.reader(given.new_tokens),
                None if given.num_sequences is None else sizes.reader(given.num_sequences),
            )
            for action, given in zip(caches, rewritten.inputs, strict=True)
            if action.makes_cache
        )
        outputs = (
            (replace(action, shape=()), tuple(sizes.reader(size) for size in action.shape))
            for action in rewritten.outputs
        )
        return cls(
            caches, tuple(made), tuple(outputs), tuple(dequantized), rewritten.by_reference,
            rewritten.buffered_inputs, rewritten.stacks, conceals, rewritten.adjacent,
            _plain_inputs(rewritten, mutated),
        )  # fmt: skip


def _action_of_call(action: InputAction) -> InputAction:
    """The part of an action that a plan keeps: no symbols, and no computation that only adoption needs."""
    packs_in_call = action.kind == "functional" and action.num_sequences is None and asks_for_written(action)
    return replace(action.without_symbols, first_position=action.first_position if packs_in_call else None)


def _plain_inputs(rewritten: Rewritten, mutated: Iterable[int]) -> PlainInputs | None:
    packed = {action.index for action in rewritten.inputs}
    parts = tuple(place for stack in rewritten.stacks for place in stack.places.values() if place not in packed)
    return PlainInputs(parts, frozenset(mutated) - packed) if parts else None


class PackedCall:
    """The compiled, rewritten graph, callable with the inputs of the graph before rewriting."""

    def __init__(self, compiled: Callable[[list[Any]], Sequence[Any]], plan: CallPlan) -> None:
        self._compiled = compiled
        self._conceals = plan.conceals
        self._known = KnownCaches()
        self._fixed = FixedInputs() if plan.by_reference else None
        self._buffered = plan.buffered_inputs
        self._stacks = plan.stacks
        self._plain = plan.plain
        self._made = plan.made
        self._places = [action.index for action in plan.caches]
        self._dequantized = plan.dequantized
        written = [action.index for action in plan.caches if action.kind == "static"]
        self._written = written + [plain.index for plain in plan.dequantized if plain.mutated]
        self._read = [action.index for action in plan.caches if action.kind != "static"]
        self._read += [plain.index for plain in plan.dequantized if not plain.mutated]
        self._outputs = plan.outputs
        self._parameters = AdjacentParameters(plan.adjacent) if plan.adjacent else None

    def __call__(self, args: list[Any]) -> list[Any]:
        if self._conceals:
            args[:] = revealed(args)
        shapes = [(action, [read(args) for read in readers]) for action, readers in self._outputs]
        made = [
            (action, tokens(args), sequences(args) if sequences is not None else None)
            for action, tokens, sequences in self._made
        ]
        if self._stacks:
            args[:] = with_parts(args, self._stacks)
        if self._plain is not None:
            self._plain.check(args)
        written = [args[index] for index in self._written]
        returned: list[tuple[int, PackedTensor]] = []
        changed: list[tuple[Tensor, Tensor]] = []
        dequantized = [plan for plan in self._dequantized if isinstance(args[plan.index], PackedSubclass)]
        if dequantized or not self._replace_known(args):
            check_distinct(written, [args[index] for index in self._read])
            for action, new_tokens, num_sequences in made:
                args[action.index] = cache = _new_cache(args, action, new_tokens, num_sequences)
                returned.extend((output, cache) for output in action.outputs)
            self._replace_caches(args)
            for plan in dequantized:
                tensor = args[plan.index]
                args[plan.index] = strided_as(tensor, tensor.dequantize())
                if plan.mutated:
                    changed.append((tensor, args[plan.index]))
        buffered, buffers = self._buffer(args)
        if self._parameters is not None:
            self._parameters.put(args)
        try:
            outputs = list(self._compiled(args))
        except (IndexError, RuntimeError) as error:
            if "out of bounds" in str(error):
                raise IndexError(_out_of_bounds(error, written)) from error
            raise
        if buffered:
            copy_each(buffered, buffers)
        for tensor, new_values in changed:
            store_changes(tensor, new_values)
        for index, cache in returned:
            outputs[index] = cache
        for output, shape in shapes:
            outputs[output.index] = _wrap(outputs[output.index], output, shape)
        return _joined(outputs, [output for stack in self._stacks for output in stack.returned])

    def _replace_known(self, args: list[Any]) -> bool:
        """Replace caches as :meth:`_replace_caches` does, but without checks, if the last call had the same caches."""
        if self._made:
            return False
        data = self._known.data_of([args[place] for place in self._places])
        if data is None:
            return False
        self._put(args, data if self._fixed is None else self._fixed.referred)
        return True

    def _replace_caches(self, args: list[Any]) -> None:
        """Replace caches by their packed data, or by references to it."""
        caches = [args[place] for place in self._places]
        data = [_data_of(cache) for cache in caches]
        self._put(args, data if self._fixed is None else self._fixed.refer(data))
        self._known.remember(caches, data)

    def _put(self, args: list[Any], data: list[Tensor]) -> None:
        for place, own in zip(self._places, data, strict=True):
            args[place] = own

    def _buffer(self, args: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Replace the inputs that need a fixed address by buffers. Returns these inputs and their buffers."""
        if self._fixed is None or not self._buffered:
            return [], []
        inputs = [args[place] for place in self._buffered]
        buffers = self._fixed.buffers_of(inputs)
        for place, buffer in zip(self._buffered, buffers, strict=True):
            args[place] = buffer
        return inputs, buffers


def with_parts(args: Sequence[Any], stacks: Sequence[SplitStack]) -> list[Any]:
    """The inputs of a graph whose stacks were split: parts of each packed stack, or views of each plain stack."""
    parts: dict[int, Tensor] = {}
    for stack in stacks:
        whole = args[stack.index]
        of = dict(whole.items()) if isinstance(whole, PackedStack) else None
        parts |= {
            place: stack.view_of(whole, index) if of is None else of[index] for index, place in stack.places.items()
        }
    behind = range(len(args), max(parts, default=-1) + 1)
    return [*(parts.get(place, arg) for place, arg in enumerate(args)), *(parts[place] for place in behind)]


def _joined(outputs: list[Any], stacks: Sequence[JoinedOutput]) -> list[Any]:
    """The outputs of a graph, with the parts of each split stack joined again."""
    result = list(outputs)
    for stack in stacks:
        parts = [outputs[place] for place in stack.places.values()]
        shape = [1 + index for index in max(stack.places)]
        if any(isinstance(part, PackedTensor) for part in parts):
            whole = PackedStack.of_parts(parts, shape, stack.dims)
            result[stack.index] = PackedRanges.of(whole) if stack.num_ranges else whole
        else:
            result[stack.index] = without_ranges(stacked(parts, shape, stack.dims), stack.num_ranges)
    return result[: len(outputs) - sum(len(stack.places) - 1 for stack in stacks)]


@dataclass(frozen=True)
class Adoption:
    """A plain tensor that must be packed.

    Attributes:
        tensor: a cache, or a stack of caches.
        parts: the parts to pack.
        stacked_dims, num_ranges: as ``dims`` and ``num_ranges`` of :class:`SplitStack`.
        num_written: the number of written tokens by part, for parts whose packing needs it and where it is known.
    """

    tensor: Tensor
    parts: PackedParts
    stacked_dims: tuple[int, ...]
    num_written: Mapping[PartIndex, Tensor]
    num_ranges: int = 0


class InputAdoption:
    """Finds the plain inputs of a graph that must be packed before a call."""

    def __init__(self, caches: Sequence[InputAction], stacks: Sequence[SplitStack]) -> None:
        """Takes the caches and the stacks of :class:`AdoptingCall`."""
        self._caches = adopted_by_input(caches, stacks)
        self._stacks = {stack.index: stack for stack in stacks}

    def plain_among(self, args: Sequence[Any]) -> list[Adoption]:
        """The plain tensors among the inputs of a call that :func:`adopt_all` must pack."""
        return [
            adoption
            for index, parts in self._caches.items()
            if type(args[index]) is not PackedTensor
            for adoption in _plain(args[index], parts, self._stacks.get(index), args)
        ]

    def with_copies(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of a call, with copies in place of those that :func:`adopt_all` would change."""
        caches = self._caches.items()
        plain = {index for index, parts in caches if _plain(args[index], parts, self._stacks.get(index), args)}
        return [arg.clone() if index in plain else arg for index, arg in enumerate(args)]


class AdoptingCall:
    """The compiled function that Dynamo calls: adopts plain caches, then runs the packed graph."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        caches: Sequence[InputAction],
        stacks: Sequence[SplitStack],
        fallback: Callable[..., Any] | None,
        graph: report.GraphReport,
        guard: KeyGuard | None = None,
        conceals: bool = False,
        shards: LocalShards | None = None,
        shard: ContextShard | None = None,
        packs_copies: bool = False,
    ) -> None:
        """
        Args:
            compiled: the result of ``compile_fx`` for the packed graph.
            caches: the inputs that must be packed, with their positions after stacks were split.
            stacks: the inputs that are split.
            fallback: the original graph, run by plain Inductor. Without it a cache that cannot be packed is an error.
            graph: the graph's entry in the report.
            guard: examines the inputs of the first call, whose caches may still be plain.
            conceals: whether AOTAutograd's wrapper unwraps tensor subclasses, so packed caches must be concealed.
            shards: the distributed parameters whose local shards the packed graph takes.
            shard: the tokens of every packed cache that this process keeps; None if it keeps all.
            packs_copies: whether calls pack copies of plain caches, and leave the caller's own caches plain.
        """
        self._compiled = compiled
        self._stacks = stacks
        self._inputs = InputAdoption(caches, stacks)
        self._fallback = fallback
        self._graph = graph
        self._leftovers = Leftovers()
        self._guard = guard
        self._conceals = conceals
        self._shards = shards
        self._shard = shard
        self._packs_copies = packs_copies
        self._places = [action.index for action in caches]

    def __call__(self, *args: Any) -> Any:
        guard, self._guard = self._guard, None  # another thread may make a first call at the same time
        if guard is not None:
            guard.look(with_parts(args, self._stacks))
        if plain := self._inputs.plain_among(args):
            try:
                args = self._with_packed(plain, args)
            except AdoptionError as error:
                if self._shard is not None or self._fallback is None:
                    raise
                report.ran(self._graph, plain_because=str(error))
                return self._fallback(*args)
        report.ran(self._graph)
        local = args if self._shards is None else self._shards.of(args)
        if self._shard is not None:
            return self._run_on_shards(list(local))
        return self._run(local)

    def _run(self, args: Sequence[Any]) -> Any:
        if not self._conceals:
            return self._compiled(*args)
        concealed = (Concealed.of(arg) if isinstance(arg, PackedSubclass) else arg for arg in args)
        return revealed(self._compiled(*concealed))  # a model may return one of its input caches

    def _run_on_shards(self, args: list[Any]) -> Any:
        """Run the graph on the caches of this rank. If it returns one of them, the caller gets the original cache."""
        owners = {}
        for place in self._places:
            cache = args[place]
            args[place] = cache.local
            owners[id(cache.local)] = cache
        return [owners.get(id(result), result) for result in self._run(args)]

    def _with_packed(self, plain: Sequence[Adoption], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a call after the caches ``plain``, or copies of them, are packed."""
        tensors = [cache.tensor for cache in plain]
        if self._packs_copies:
            self._leftovers.retry(tensors, lambda: check_all(plain))
            args = tuple(self._inputs.with_copies(args))
            adopt_all(self._inputs.plain_among(args))
        elif self._shard is None:
            self._leftovers.retry(tensors, lambda: adopt_all(plain))
        else:  # if one rank fails, the other ranks would wait for it
            adopt_shards = partial(adopt_all, plain, self._shard)
            together(self._shard, lambda: self._leftovers.retry(tensors, adopt_shards))
        return args


Parts = Mapping[PartIndex, InputAction]
"""The actions for the parts of one input, before stacks are split."""


def adopted_by_input(caches: Sequence[InputAction], stacks: Sequence[SplitStack]) -> dict[int, Parts]:
    """The parts that a call packs in the caller's own tensors, by input, before stacks are split."""
    origin = {place: (stack.index, part) for stack in stacks for part, place in stack.places.items()}
    result: dict[int, dict[PartIndex, InputAction]] = {}
    for action in caches:
        if not action.makes_cache:
            index, part = origin.get(action.index, (action.index, ()))
            result.setdefault(index, {})[part] = action
    return dict(result)


def _plain(tensor: Tensor, parts: Parts, stack: SplitStack | None, args: Sequence[Any]) -> list[Adoption]:
    """The plain tensors of an input that must be adopted before a call with ``args``."""
    if isinstance(tensor, PackedStack):
        own = dict(tensor.items())
        return [adoption for index, how in parts.items() for adoption in _plain(own[index], {(): how}, None, args)]
    if isinstance(tensor, (PackedTensor, PackedPool, PackedShard)):
        return []
    dims, num_ranges = (stack.dims, stack.num_ranges) if stack is not None else ((), 0)
    size = shape_of_part(tensor, dims, num_ranges)
    known = ((index, num_written(how, size[how.axes.index("t")], args)) for index, how in parts.items())
    written = {index: number for index, number in known if number is not None}
    layouts = {index: (how.layout, how.axes) for index, how in parts.items()}
    return [Adoption(tensor, layouts, dims, written, num_ranges)]


def adopt_all(caches: Sequence[Adoption], shard: ContextShard | None = None) -> None:
    """Adopt all caches or none, because a graph runs packed or plain as a whole.

    With ``shard``, this process keeps only its share of the tokens of each cache. No cache is then a stack.
    """
    check_all(caches, shard)
    for plain in caches:
        if () in plain.parts:
            adopt(plain.tensor, *plain.parts[()], shard=shard, num_written=plain.num_written.get(()))
        else:
            adopt_stack(plain.tensor, plain.parts, plain.stacked_dims, plain.num_written, plain.num_ranges)


def check_all(caches: Sequence[Adoption], shard: ContextShard | None = None) -> None:
    """Raise the AdoptionError of :func:`adopt_all`."""
    for plain in caches:
        check_adoptable(plain.tensor, plain.parts, plain.stacked_dims, plain.num_ranges, shard)


def _data_of(packed: PackedTensor | PackedPool) -> Tensor:
    """The packed data, with the number of blocks that the compiled graph expects for this length."""
    if type(packed) is PackedTensor and not packed.cache_meta.growing and packed.is_whole:
        return packed.packed
    cache: PackedTensor = slots_of(packed).whole()
    if cache.growing and cache.packed.shape[0] != cache.packed_layout.growing_blocks(cache.num_tokens):
        cache = cache.extended(0)
    return cache.packed


def _new_cache(args: list[Any], action: InputAction, new_tokens: int, num_sequences: int | None) -> PackedTensor:
    """The cache that the graph writes and the caller gets. The graph's writes do not change the cache in ``args``.

    The caller may keep the cache in ``args``, plain or packed. A growing cache may share its memory, because new tokens
    are stored after the old ones.
    """
    source, growing = args[action.index], action.kind == "growing"
    if isinstance(source, PackedTensor):
        cache = source.whole() if growing or num_sequences is not None else _copy_of(source.whole())
    else:
        written = num_written(action, source.shape[action.axes.index("t")], args)
        cache = PackedTensor.from_dense(source, action.layout, action.axes, growing=growing, num_written=written)
    if num_sequences is not None:
        cache = _copy_of(cache, torch.zeros(num_sequences, dtype=torch.int64, device=cache.device))
    return cache.extended(new_tokens) if growing else cache


def _copy_of(cache: PackedTensor, sequences: Tensor | None = None) -> PackedTensor:
    """A copy of all sequences, or of the sequences with given indices. It copies bytes."""
    copy = cache.clone() if sequences is None else cache.index_select(cache.axes.index("b"), sequences)
    assert isinstance(copy, PackedTensor)
    return copy


def _wrap(data: Tensor, action: OutputAction, shape: list[int]) -> PackedTensor:
    return PackedTensor.over(data, action.layout, action.dtype, action.axes, shape, growing=action.growing)


def _out_of_bounds(error: Exception, written: list[Any]) -> str:
    """The message of a step with an index out of bounds, usually a position past the end of a cache."""
    sizes = sorted({cache.num_tokens for cache in written if isinstance(cache, PackedTensor)})
    caches = f"it writes packed caches of {', '.join(map(str, sizes))} tokens" if sizes else "it writes packed caches"
    return (
        f"an index of a compiled step is out of bounds: {one_line(error)}; {caches}: if it went past their end, {ROOM}"
    )
