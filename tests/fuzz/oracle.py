"""Run a program plain and packed, and compare everything that it yields."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import linecache
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from node_by_node import interpret, running_node_by_node
from policies import reading_packed
from releases import is_before
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvcompile
from kvcompile.errors import KVCompileError
from kvcompile.kernels.formats import get_format
from kvcompile.kernels.spec import new_tokens
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.refusal import Reason
from kvcompile.policy.policy import Policy
from kvcompile.report.data import outcome

Drive = Callable[[Callable[..., Any], Any], Iterator[Any]]

LOSSLESS = ("float32", "bfloat16", "float16")

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 8e-2, torch.float16: 5e-3}
"""The relative and absolute tolerance of attention: the sums of packed attention have another order, and more bits."""


@dataclass
class New:
    """Makes the tensors of a program; two objects with the same seed make the same tensors.

    Attributes:
        policy: the format of :meth:`cache`; None for plain caches.
        precise: whether tensors hold their numbers of ``dtype`` in float64.
    """

    dtype: torch.dtype
    device: str
    seed: int = 0
    policy: str | None = None
    precise: bool = False
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, *shape: int) -> Tensor:
        """Normally distributed numbers."""
        numbers = torch.randn(shape, generator=self.generator).to(self.device, self.dtype)
        return numbers.double() if self.precise else numbers

    def cache(self, role: str, axes: str, *shape: int, growing: bool = False, head_dim: int | None = None) -> Tensor:
        """A cache of normally distributed numbers; ``head_dim`` is needed if heads share a dimension."""
        plain = self(*shape)
        if self.policy is None:
            return plain
        formats = Policy.load(self.policy).formats_for("", 0, 1)
        assert formats is not None
        layout = formats.layout(role, head_dim or shape[axes.index("d")], self.dtype)
        return PackedTensor.from_dense(plain, layout, axes, growing=growing)

    def range(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator).to(self.device)

    def beams(self, count: int) -> Tensor:
        """Sequences, some of them repeatedly."""
        return torch.randint(count, (count,), generator=self.generator).to(self.device)

    def table(self, batch: int, blocks: int) -> Tensor:
        """A block table in which every sequence has separate blocks, and block 0 belongs to no sequence."""
        return 1 + self.order(batch * blocks).view(batch, blocks)


@dataclass
class Outcome:
    """The result of a comparison.

    Attributes:
        verdict: ``equal``; ``wrong``; ``crash``: only the packed program raises, and not on purpose; ``loud``: it
            raises an error that tells the remedy; ``invalid``: the plain program raises, too, in eager code or as
            Inductor compiles it. Its graphs then run in the same way as the graphs of the packed program.
        detail: the difference or the error.
        outcomes: the outcome of every site of every graph; its reason, if it was not rewritten.
        plain_calls: why calls of rewritten graphs ran as plain Inductor would.
        packed_calls: the number of calls that ran on packed caches.
        earlier: outcomes of the graphs that an earlier program with the same compiled function had compiled.
    """

    verdict: str
    detail: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    plain_calls: Counter[str] = field(default_factory=Counter)
    packed_calls: int = 0
    earlier: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> bool:
        return self.verdict in ("wrong", "crash")

    @property
    def rewritten(self) -> bool:
        """Whether every site was rewritten and every call ran on packed caches.

        A graph of an earlier program may have been refused because that program had exchanged its keys and values.
        """
        outcomes = {*self.outcomes, *(self.earlier.keys() - {Reason.packed_otherwise.name})}
        return outcomes == {"rewritten"} and not self.plain_calls and self.packed_calls > 0


class Difference(AssertionError):
    """The packed program yields other values than the plain program."""


def step_of(text: str) -> dict[str, Any]:
    """The names that the text of a compiled function defines, for :func:`drive_of`."""
    return _defined(text, {"torch": torch, "F": F, "nn": nn, "copy": copy, "math": math, "kvcompile": kvcompile})


def drive_of(text: str, step: dict[str, Any]) -> Drive:
    """``drive`` of a program's text. Programs that share ``step`` share its compiled code."""
    result: Drive = _defined(text, step)["drive"]
    return result


def _defined(text: str, names: dict[str, Any]) -> dict[str, Any]:
    """``names``, and the names that a text defines. Dynamo and tracebacks find the text under its own name."""
    name = f"<program {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names = dict(names)
    exec(compile(text, name, "exec"), names)
    return names


@dataclass(frozen=True)
class How:
    """How a program is compiled and run.

    Attributes:
        policy: the format of all caches.
        dtype: the dtype of all tensors.
        device: where everything runs.
        operators: without generated code, whether rewritten graphs have the operators of ``kvcompile::``, as on a GPU.
        dynamic: whether sizes that change between steps become symbols; otherwise each size is compiled.
        starts_packed: whether the caller packs the caches; otherwise the first step packs them.
        exact_prompts: whether attention to new tokens is exact, for few queries too; formats must lose nothing then.
        seed: of all numbers.
        generate_code: whether Inductor generates code; otherwise graphs run node by node.
        verify: whether kvcompile checks its own rewrites, too.
    """

    policy: str = "float32"
    dtype: str = "float32"
    device: str = "cpu"
    operators: bool = False
    dynamic: bool = True
    starts_packed: bool = False
    exact_prompts: bool = False
    seed: int = 0
    generate_code: bool = False
    verify: bool = False

    @property
    def loses_nothing(self) -> bool:
        return self.policy in LOSSLESS

    @property
    def stores_alike(self) -> bool:
        """Whether equal vectors have equal bytes: a rotation rounds differently for other numbers of vectors."""
        formats = Policy.load(self.policy).formats_for("", 0, 1)
        return formats is not None and not any(get_format(name).rotated for name in (formats.key, formats.value))

    def new(self, packed: bool = False) -> New:
        """The object that makes the tensors of a program."""
        return New(getattr(torch, self.dtype), self.device, self.seed, self.policy if packed else None)

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        policy = Policy.load(self.policy) if self.exact_prompts else reading_packed(self.policy)
        backend = kvcompile.kvquant(policy=policy, on_unsupported="ignore", verify=self.verify)
        result: Callable[..., Any] = torch.compile(step, backend=backend, dynamic=None if self.dynamic else False)
        return result

    def compiled_plain(self, step: Callable[..., Any]) -> Callable[..., Any]:
        backend: Any = "inductor" if self.generate_code else functools.partial(compile_fx, inner_compile=interpret)
        result: Callable[..., Any] = torch.compile(step, backend=backend, dynamic=None if self.dynamic else False)
        return result

    def attending(self) -> contextlib.AbstractContextManager[None]:
        """On a GPU, only some backends of attention give zeros for rows that see no key, as on a CPU."""
        return contextlib.nullcontext() if self.device == "cpu" else sdpa_kernel(SDPBackend.MATH)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Graphs run node by node or as code."""
        graphs = contextlib.nullcontext() if self.generate_code else running_node_by_node(self.operators)
        most_packed = 0 if self.exact_prompts else new_tokens.MAX_PACKED_QUERIES
        with graphs, mock.patch.object(new_tokens, "MAX_PACKED_QUERIES", most_packed):
            yield


def compare(drive: Drive, how: How) -> Outcome:
    """Run ``drive`` with plain and with packed caches, and compare what it yields.

    Formats that lose nothing are compared with plain caches. The other formats are compared with eager code on packed
    caches, and only if kvcompile packs everything.

    Args:
        drive: takes ``compile`` and ``new``; yields what must be equal.
        how: how it runs.
    """
    # Code of PyTorch 2.11 loses some of the numbers that a step reads with .item(), see docs/limits.md.
    captures = not (how.generate_code and is_before("2.13"))
    dynamo = torch._dynamo.config.patch(recompile_limit=64, capture_scalar_outputs=captures)
    with torch.no_grad(), how.attending(), dynamo:
        try:
            plain = drive(lambda step: step, how.new(packed=not how.loses_nothing))
            expected = [_values(item) for item in plain]
        except Exception as error:
            return Outcome("invalid", f"{type(error).__name__}: {error}")
        with kvcompile.collect_reports() as report, how.running():
            try:
                result = _compared(drive(how.compiled, how.new(packed=how.starts_packed)), expected, drive, how)
            except Exception as error:
                result = Outcome(_verdict_of(error, drive, how), f"{type(error).__name__}: {error}")
    result.outcomes.update(site.reason_code or outcome(site) for site in report.sites)
    for runs in report.runs.values():
        result.plain_calls.update(runs.plain)
        result.packed_calls += runs.packed
    if not how.loses_nothing and result.verdict == "wrong" and not result.rewritten:
        result.verdict = "equal"  # plain caches lose nothing, so there is nothing to compare with
    return result


def check(drive: Drive, policy: str = "float32", dtype: str = "float32", **how: Any) -> None:
    """Raise AssertionError if the packed program differs from the plain one; ``how`` as for :class:`How`."""
    result = compare(drive, How(policy, dtype, **how))
    assert result.verdict in ("equal", "loud"), f"{result.verdict}: {result.detail}"


def _verdict_of(error: Exception, drive: Drive, how: How) -> str:
    if _is_on_purpose(error):
        return "loud"
    return "invalid" if _raises_without_kvcompile(error, drive, how) else "crash"


def _raises_without_kvcompile(error: Exception, drive: Drive, how: How) -> bool:
    """Whether plain Inductor, run in the same way, raises an error of the same type: if so, the fault is PyTorch's."""
    torch._dynamo.reset()
    try:
        for _ in drive(how.compiled_plain, how.new()):
            pass
    except Exception as other:
        return type(other) is type(error)
    return False


def _compared(got: Iterator[Any], expected: Sequence[list[Any]], drive: Drive, how: How) -> Outcome:
    tolerance = TOLERANCES[getattr(torch, how.dtype)]
    for number, (item, values) in enumerate(zip(got, expected, strict=True)):
        packed = [isinstance(leaf, PackedSubclass) for leaf in _leaves(item)]
        for place, (value, other, is_packed) in enumerate(zip(_values(item), values, packed, strict=True)):
            is_exact = is_packed and how.stores_alike
            difference = _difference(value, other, 0.0 if is_exact else tolerance)
            if difference and not is_exact:
                precise = _precise_value(drive, how, number, place)
                if precise is not None and not _difference(value, precise.to(value.dtype), tolerance):
                    continue
            if difference:
                return Outcome("wrong", f"yield {number}, value {place}: {difference}")
    return Outcome("equal")


def _precise_value(drive: Drive, how: How, number: int, place: int) -> Tensor | None:
    """The value that the plain program yields in float64, which decides if plain code in half precision is inaccurate.

    Returns:
        The value at a place of an item; None if the format loses bits, or if the program does not run in float64.
    """
    if not how.loses_nothing or how.dtype == "float32":
        return None
    try:
        items = drive(lambda step: step, dataclasses.replace(how.new(), precise=True))
        return _values(next(itertools.islice(items, number, None)))[place]
    except Exception:
        return None


def _leaves(item: Any) -> list[Any]:
    return list(item) if isinstance(item, tuple) else [item]


def _values(item: Any) -> list[Tensor]:
    """Copies of the plain values of everything that was yielded."""
    return [
        leaf.dequantize().clone() if isinstance(leaf, PackedSubclass) else leaf.clone().as_subclass(Tensor)
        for leaf in _leaves(item)
    ]


def _difference(value: Tensor, expected: Tensor, tolerance: float) -> str:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return f"{tuple(value.shape)} {value.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    close = torch.isclose(value.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    if bool(close.all()):
        return ""
    first = tuple((~close).nonzero()[0].tolist())
    count = f"{int((~close).sum())} of {close.numel()} numbers differ"
    return f"{count}, first at {list(first)}: {value[first]}, expected {expected[first]}"


def _is_on_purpose(error: BaseException) -> bool:
    """Whether an error, or an error that caused it, comes from kvcompile and tells a remedy."""
    known = (KVCompileError, NotImplementedError)
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    return any(isinstance(cause, known) and str(cause) for cause in causes)
