"""Random programs give the same values, shapes, strides, aliasing and errors on packed caches as on plain caches.

The formats ``float32`` and ``bfloat16`` lose nothing, so results are equal bit by bit. With a lossy format, only writes
quantize: after every step the plain cache gets the values of the packed cache. Vectors that the step did not change
must have kept their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.layout.axes import WHOLE_AXES
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.packed.tensor import PackedTensor

HEAD_DIM = 16
LENGTHS = (0, 1, 63, 64, 65, 128, 130)
pytestmark = pytest.mark.usefixtures("seed_without_grad")


@st.composite
def layouts(draw: Any, dtype: torch.dtype) -> list[PackedLayout]:
    """Layouts of keys and values in a format that loses nothing, with and without a residual."""
    residual = draw(st.sampled_from([None, (0, 1), (1, 0), (1, 2)]))
    name = str(dtype).removeprefix("torch.")
    held = residual and Residual(*residual, dtype)
    return [PackedLayout(name, "key", HEAD_DIM, held), PackedLayout(name, "value", HEAD_DIM, held)]


@dataclass
class Pair:
    """A packed tensor or packed view, and the plain tensor that must behave identically."""

    packed: Tensor
    plain: Tensor


@dataclass
class Program:
    """A random program: its random choices, the caches, and the views that it keeps."""

    data: Any
    pairs: list[Pair] = field(default_factory=list)

    def draw(self, strategy: Any) -> Any:
        return self.data.draw(strategy)

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def pick(self) -> Pair:
        return self.draw(st.sampled_from(self.pairs))


def random_values(program: Program, shape: Any, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(program.number(0, 9999))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


Operation = Callable[[Tensor], Any]


def a_dim(program: Program, x: Tensor) -> int:
    return program.number(-x.dim(), x.dim() - 1) if x.dim() else 0


def an_index(program: Program, extent: int) -> int:
    """An index within the extent or one beyond it. Block boundaries are likely."""
    boundaries = [index for index in (1, 63, 64, 65, extent - 1) if 0 <= index < extent]
    return program.draw(st.sampled_from(boundaries) | st.integers(-extent - 1, extent) if boundaries else st.just(0))


def a_view(program: Program, x: Tensor) -> Operation:
    """A random view operator. Some are errors for a plain tensor too."""
    dim, other = a_dim(program, x), a_dim(program, x)
    extent = x.shape[dim] if x.dim() else 0
    begin, end, step = an_index(program, extent), an_index(program, extent), program.number(1, 3)
    order = program.draw(st.permutations(range(x.dim())))
    index = (slice(None),) * (dim % max(x.dim(), 1))
    return program.draw(
        st.sampled_from(
            [
                lambda c: c[(*index, slice(begin, end))],
                lambda c: c[(*index, slice(begin, end, step))],
                lambda c: c.narrow(dim, begin, 1),
                lambda c: c.select(dim, begin),
                lambda c: c.transpose(dim, other),
                lambda c: c.permute(order),
                lambda c: c.unsqueeze(dim),
                lambda c: c.squeeze(dim),
                lambda c: c.flatten(*sorted(each % max(c.dim(), 1) for each in (dim, other))),
                lambda c: c.view(-1),
                lambda c: c.view(*c.shape[:-1], 2, c.shape[-1] // 2),
                lambda c: c.unsqueeze(0).expand(2, *c.shape),
                lambda c: c.split(max(extent // 2, 1), dim)[-1],
                lambda c: c.unbind(dim)[0],
                lambda c: c.chunk(2, dim)[0],
                lambda c: c.diagonal(0, dim, other),
                lambda c: c.unfold(dim, 2, step),
                lambda c: c.as_strided(c.shape, c.stride()),
                lambda c: c.mT,
                lambda c: c.detach(),
                lambda c: c.movedim(dim, other),
            ]
        )
    )


def positions(program: Program, extent: int) -> Tensor:
    """Distinct indices; the list may be empty, or contain one index out of range."""
    high = extent if program.number(0, 9) == 0 else extent - 1
    low = -extent if program.number(0, 9) == 0 else 0
    chosen = program.draw(
        st.lists(st.integers(low, max(high, low)), max_size=4, unique_by=lambda i: i % max(extent, 1))
    )
    return torch.tensor(chosen if extent else [], dtype=torch.int64)


def a_write(program: Program, pair: Pair) -> Operation:
    """A random operator that writes its argument. Some are errors for a plain tensor too."""
    x, dtype = pair.plain, pair.plain.dtype
    dim = a_dim(program, x)
    extent = x.shape[dim] if x.dim() else 0
    index = positions(program, extent)
    shape = list(x.shape)
    if x.dim():
        shape[dim] = index.numel()
    values, new = random_values(program, shape, dtype), random_values(program, x.shape, dtype)
    prefix = (slice(None),) * (dim % max(x.dim(), 1))
    mask_of_dim = random_values(program, (extent,), torch.float32) > program.draw(st.sampled_from([-9, 0.5, 9]))
    mask = new > program.draw(st.sampled_from([-9, 0.5, 9]))
    vector_mask = mask[..., 0] if x.dim() and x.shape[-1] else mask
    wrong = random_values(program, (3,), dtype)
    last = new[..., :1] if x.dim() else new
    return program.draw(
        st.sampled_from(
            [
                lambda c: c.copy_(new),
                lambda c: c.copy_(last),
                lambda c: c.copy_(wrong),
                lambda c: c.zero_(),
                lambda c: c.fill_(0.5),
                lambda c: c.index_copy_(dim, index, values),
                lambda c: c.index_fill_(dim, index, 2.0),
                lambda c: c.__setitem__((*prefix, index), values),
                lambda c: c.__setitem__((*prefix, index), 1.0),
                lambda c: c.__setitem__((*prefix, mask_of_dim), 1.5),
                lambda c: c.__setitem__(mask, 0.25),
                lambda c: c.__setitem__(vector_mask, 0.25),
                lambda c: c.__setitem__(..., new),
                lambda c: c.mul_(0.5),
                lambda c: c.add_(new),
                lambda c: c.add_(last),
                lambda c: c.add_(wrong),
                lambda c: c.mul_(c),
                lambda c: c.clamp_(-0.5, 0.5),
                lambda c: c.masked_fill_(mask, 3.0),
                lambda c: c.masked_fill_(vector_mask[..., None], torch.nan),
                lambda c: torch.add(new, 1, out=c),
                lambda c: torch._foreach_mul_([c, c], 2.0),
                lambda c: c.index_add_(dim, index, values),
                lambda c: c.scatter_(
                    dim, index.reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim())).expand(shape), values
                ),
                lambda c: c.squeeze_(0) if c.dim() == 99 else c.neg_(),
            ]
        )
    )


def repeat_kv(c: Tensor) -> Tensor:
    """A copy in which each index of the second dimension follows itself, as Transformers repeats heads."""
    repeated = c[:, :, None].expand(*c.shape[:2], 2, *c.shape[2:]).reshape(c.shape[0], -1, *c.shape[2:])
    return repeated.contiguous()  # the copy of a single head would be a view


def a_copy(program: Program, pair: Pair) -> Operation:
    """An operator whose result shares nothing with its argument."""
    x = pair.plain
    dim = a_dim(program, x)
    index = positions(program, x.shape[dim] if x.dim() else 0)
    shape = list(x.shape)
    if x.dim():
        shape[dim] = program.number(0, 2)
    new = random_values(program, shape, x.dtype)
    mask = random_values(program, (*x.shape[:-1], 1), torch.float32) > 0
    return program.draw(
        st.sampled_from(
            [
                lambda c: c.clone(),
                lambda c: c.contiguous().clone(),
                lambda c: c.index_select(dim, index),
                lambda c: c[(slice(None),) * (dim % max(c.dim(), 1)) + (index,)],
                lambda c: torch.cat([c, new], dim),
                lambda c: torch.cat([c, c], dim),
                lambda c: c.repeat_interleave(2, dim),
                repeat_kv,
                lambda c: c.roll(1, dim),
                lambda c: torch.where(mask, 1.0, c),
            ]
        )
    )


def outcome(operation: Operation, x: Tensor) -> Any:
    """The result of an operation, or its error."""
    try:
        return operation(x)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return error


def same_outcome(operation: Operation, pair: Pair) -> tuple[Any, Any]:
    """The results of an operation on both tensors. It must fail for both or for neither.

    An index out of range may raise for an empty packed cache alone: PyTorch does not check indices of empty tensors.
    """
    got, expected = outcome(operation, pair.packed), outcome(operation, pair.plain)
    if isinstance(got, IndexError) and pair.plain.numel() == 0:
        return got, got
    assert isinstance(got, Exception) == isinstance(expected, Exception), (got, expected)
    return got, expected


def bits(x: Tensor) -> Tensor:
    x = x.clone().contiguous()
    return torch.where(x.isnan(), 1, x.view({2: torch.int16, 4: torch.int32}[x.element_size()]).long())


def check(pair: Pair) -> None:
    assert pair.packed.shape == pair.plain.shape
    assert pair.packed.dtype == pair.plain.dtype
    assert torch.equal(bits(pair.packed), bits(pair.plain))


def run_view(program: Program) -> None:
    pair = program.pick()
    got, expected = same_outcome(a_view(program, pair.plain), pair)
    if isinstance(expected, Exception):
        return
    assert (got.shape, got.stride()) == (expected.shape, expected.stride())
    check(Pair(got, expected))
    if len(program.pairs) < 8:
        program.pairs.append(Pair(got, expected))


def run_write(program: Program) -> None:
    pair = program.pick()
    if 0 in pair.plain.stride():
        return  # PyTorch does not write to expanded memory
    operation = a_write(program, pair)
    before = pair.plain.clone()
    got, expected = same_outcome(operation, pair)
    if isinstance(expected, Exception):
        pair.plain.copy_(before)  # PyTorch itself may have written some values before the error
    elif isinstance(expected, Tensor):
        assert got is pair.packed


def run_copy(program: Program) -> None:
    pair = program.pick()
    got, expected = same_outcome(a_copy(program, pair), pair)
    if not isinstance(expected, Exception):
        check(Pair(got, expected))
        # Packed copies are contiguous, whatever the strides of a plain copy.
        expected = expected.new_empty_strided(got.shape, got.stride()).copy_(expected)
        if len(program.pairs) < 8:
            program.pairs.append(Pair(got, expected))


def run_copy_between(program: Program) -> None:
    """Copy from one tensor to another; both may be views of one cache."""
    one, other = program.pick(), program.pick()
    if one.plain.shape == other.plain.shape and 0 not in one.plain.stride():
        source, expected = other.packed, other.plain.clone()  # overlapping copies are undefined in PyTorch
        assert one.packed.copy_(source) is one.packed
        one.plain.copy_(expected)


def run_read(program: Program) -> None:
    pair = program.pick()
    for read in (lambda c: c * 2, lambda c: c.abs().sort(-1).values if c.dim() else c + 1, lambda c: c.isnan()):
        assert torch.equal(read(pair.packed).nan_to_num(7), read(pair.plain).nan_to_num(7))


def run_attention(program: Program) -> None:
    """Attention of random queries to two of the tensors; the order of its sums is free.

    PyTorch does not check that keys and values have the same shape, and reads beyond their memory.
    """
    keys = program.pick()
    values = program.draw(st.sampled_from([pair for pair in program.pairs if pair.plain.shape == keys.plain.shape]))
    if (
        keys.plain.dim() != 4
        or keys.plain.numel() == 0
        or not all(pair.plain.isfinite().all() for pair in (keys, values))
    ):
        return
    batch, heads, tokens, head_dim = keys.plain.shape
    grouped, q_len = program.number(1, 2), program.number(1, 3)
    query = random_values(program, (batch, heads * grouped, q_len, head_dim), keys.plain.dtype)
    added = random_values(program, (q_len, tokens), keys.plain.dtype)
    mask = program.draw(st.sampled_from([None, added, added > 0]))
    is_causal = mask is None and program.draw(st.booleans())

    def attend(k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, k, v, mask, is_causal=is_causal, enable_gqa=grouped > 1)

    got = outcome(lambda k: attend(k, values.packed), keys.packed)
    expected = outcome(lambda k: attend(k, values.plain), keys.plain)
    assert isinstance(got, Exception) == isinstance(expected, Exception), (got, expected)
    if not isinstance(expected, Exception):
        tolerance = 2e-2 if query.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got, expected.nan_to_num(0), rtol=tolerance, atol=tolerance * 4)


STEPS = (run_view, run_view, run_write, run_write, run_copy, run_copy_between, run_read, run_attention)


def run(data: Any, num_steps: int, orders: Sequence[str] = WHOLE_AXES) -> None:
    """Run a random program of ``num_steps`` steps on a cache with the axes of one of ``orders``."""
    program = Program(data)
    dtype = program.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    of_keys_and_values = program.draw(layouts(dtype))
    axes = program.draw(st.sampled_from(orders))
    sizes = {"b": program.number(0, 2), "h": program.number(1, 3), "d": HEAD_DIM}
    sizes["m"] = sizes["h"] * HEAD_DIM
    growing = "t" in axes and program.draw(st.booleans())
    lengths = [program.draw(st.sampled_from(LENGTHS)), program.draw(st.sampled_from(LENGTHS))]
    lengths[1] = lengths[program.number(0, 1)]
    for layout, length in zip(of_keys_and_values, lengths, strict=True):
        shape = [sizes[axis] if axis != "t" else length for axis in axes]
        plain = random_values(program, shape, dtype)
        packed = PackedTensor.from_dense(plain, layout, axes, growing=growing)
        pair = Pair(packed, plain.clone())
        dim, begin = axes.index("t"), min(program.draw(st.sampled_from((1, 63, 64, 65))), plain.shape[axes.index("t")])
        view = [x.narrow(dim, begin, x.shape[dim] - begin) for x in (pair.packed, pair.plain)]
        program.pairs += [pair, Pair(*view)]
    for _ in range(num_steps):
        program.draw(st.sampled_from(STEPS))(program)
        for pair in program.pairs:
            check(pair)


SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
}


@settings(max_examples=24, derandomize=True, **SETTINGS)
@given(st.data())
def test_a_random_program_means_the_same_on_packed_and_plain_caches(data: Any) -> None:
    run(data, 6)


@pytest.mark.slow
@pytest.mark.parametrize("axes", WHOLE_AXES)
@settings(max_examples=200, derandomize=True, **SETTINGS)
@given(data=st.data())
def test_many_random_programs_mean_the_same_on_packed_and_plain_caches(data: Any, axes: str) -> None:
    run(data, 15, [axes])


@settings(max_examples=16, derandomize=True, **SETTINGS)
@given(st.data())
def test_with_a_lossy_format_a_step_changes_the_vectors_that_it_writes_and_no_others(data: Any) -> None:
    write_lossily(data)


@pytest.mark.slow
@settings(max_examples=200, derandomize=True, **SETTINGS)
@given(st.data())
def test_with_a_lossy_format_many_steps_change_the_vectors_that_they_write_and_no_others(data: Any) -> None:
    write_lossily(data)


def write_lossily(data: Any) -> None:
    """Run a random program of four writes on a cache in a lossy format."""
    program = Program(data)
    layout = PackedLayout("int8_per_token_head", "key", HEAD_DIM)
    plain = random_values(program, (2, 2, program.draw(st.sampled_from(LENGTHS)), HEAD_DIM), torch.float32)
    cache = PackedTensor.from_dense(plain, layout)
    for _ in range(4):
        old = cache.dequantize()
        computed = old.clone()
        pair = Pair(cache, computed)
        got, expected = same_outcome(a_write(program, pair), pair)
        if isinstance(expected, Exception):
            computed = old
        changed = (bits(computed) != bits(old)).any(-1)
        law = PackedTensor.from_dense(computed.nan_to_num(0), layout).dequantize()
        present = cache.dequantize()
        assert torch.equal(bits(present)[~changed], bits(old)[~changed]) or torch.equal(present, law)
        finite = changed & computed.isfinite().all(-1)
        assert torch.equal(present[finite], law[finite])
        del got
