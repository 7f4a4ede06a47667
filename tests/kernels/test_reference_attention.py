"""Attention on packed caches equals attention on dequantized caches, and compiles to fused C++."""

from __future__ import annotations

import math
import re

import pytest
import sympy
import torch
import torch.nn.functional as F
from formats_of_every_kind import BY_TOKEN, in_turn
from packed_bytes import empty_packed
from releases import is_before
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.attention import attend, attend_part, merge_parts
from kvcompile.kernels.spec.packing import read_tokens, write_tokens_

CPU = torch.device("cpu")
PAIRS = [(name, name) for name in BY_TOKEN] + [
    ("turboquant_4bit", "int4_unrotated"),
    ("fp8_e4m3", "int4_per_token_head"),
]

every_pair = pytest.mark.parametrize(("key", "value"), PAIRS)
Q_LENS = [1, 3, 40]
decode_and_prefill = pytest.mark.parametrize("q_len", Q_LENS)


class Case:
    """A random query and packed caches of random tokens."""

    def __init__(self, key="int8_per_token_head", value="int8_per_token_head", *, q_len=1, kv_len=130, capacity=0,
                 batch=2, heads=(4, 2), head_dims=(64, 64), dtype=torch.float32, fill=0):  # fmt: skip
        generator = torch.Generator().manual_seed(q_len + 7 * kv_len)
        num_heads, num_kv_heads = heads
        self.kv_len = kv_len
        self.query = torch.randn(batch, num_heads, q_len, head_dims[0], generator=generator).to(dtype)
        self.layouts = (
            PackedLayout.parse(key, "key", head_dims[0]),
            PackedLayout.parse(value, "value", head_dims[1]),
        )
        self.data = []
        for layout in self.layouts:
            x = torch.randn(batch, num_kv_heads, kv_len, layout.head_dim, generator=generator)
            data = empty_packed(layout, max(kv_len, capacity), batch, num_kv_heads, CPU).fill_(fill)
            write_tokens_(data, layout, x, torch.arange(kv_len))
            self.data.append(data)

    def attend(self, fn=attend, **kwargs):
        return fn(self.query, *self.data, *self.layouts, kv_len=self.kv_len, **kwargs)

    def expected(self, mask=None, **kwargs):
        """``F.scaled_dot_product_attention`` on the dequantized caches, in float64."""
        k, v = (read_tokens(d, layout, self.kv_len).double() for d, layout in zip(self.data, self.layouts, strict=True))
        if mask is not None:
            mask = torch.atleast_2d(mask if mask.dtype == torch.bool else mask.double())
        return F.scaled_dot_product_attention(self.query.double(), k, v, mask, enable_gqa=True, **kwargs)

    def check(self, **kwargs):
        assert_near(self.attend(**kwargs), self.expected(**kwargs))


def assert_near(actual, expected, tolerance=1e-4):
    assert actual.shape == expected.shape
    expected = expected.double()
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@every_pair
@decode_and_prefill
def test_every_pair_of_formats_equals_sdpa_on_dequantized_caches(key, value, q_len):
    Case(key, value, q_len=q_len).check()


@pytest.mark.parametrize(
    ("q_len", "heads"), in_turn([1, 2, 4, 5, 16, 17, 100], [(4, 4), (8, 2), (6, 2), (4, 1), (16, 1), (1, 1)])
)
def test_query_heads_may_share_a_kv_head(heads, q_len):
    Case(heads=heads, q_len=q_len).check()


@pytest.mark.parametrize(
    ("head_dims", "formats"),
    in_turn(
        [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (96, 64), (64, 128)],
        [("int4_per_token_head", "int4_per_token_head"), ("fp8_e4m3", "turboquant_4bit")],
    ),
)
@pytest.mark.parametrize("q_len", [1, pytest.param(3, marks=pytest.mark.slow), 40])
def test_every_head_dim_works_and_keys_and_values_may_have_different_ones(head_dims, formats, q_len):
    Case(*formats, head_dims=head_dims, q_len=q_len).check()


@pytest.mark.parametrize(("kv_len", "q_len"), in_turn([1, 63, 64, 65, 127, 128, 130, 600, 1025], [1, 40]))
def test_the_cache_may_have_any_length(kv_len, q_len):
    Case(kv_len=kv_len, q_len=q_len).check()
    Case("int4_per_token_head", "turboquant_4bit", kv_len=kv_len, q_len=q_len, capacity=kv_len + 70).check()


def attention_weights_with_sinks_and_softcap(case, mask, sinks, softcap):
    """Scores, softcap, mask, softmax with a column for the sink: written out in float64, on dequantized caches."""
    k, v = (read_tokens(d, layout, case.kv_len).double() for d, layout in zip(case.data, case.layouts, strict=True))
    group_size = case.query.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    scores = softcap * torch.tanh(case.query.double() @ k.mT * k.shape[-1] ** -0.5 / softcap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    column = sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@decode_and_prefill
def test_softcap_comes_before_the_mask_and_sinks_take_part_in_the_softmax(kind, q_len):
    case = Case("turboquant_4bit", "int4_per_token_head", q_len=q_len)
    visible = torch.arange(130) <= 90 + torch.arange(q_len)[:, None]
    mask = visible if kind == torch.bool else torch.where(visible, torch.randn(q_len, 130), -torch.inf)
    sinks = torch.tensor([0.5, -3.0, 4.0, -torch.inf])
    expected = attention_weights_with_sinks_and_softcap(case, mask, sinks, 1.5)
    assert_near(case.attend(mask=mask, sinks=sinks, softcap=1.5), expected)


@decode_and_prefill
def test_a_row_that_sees_only_its_sink_is_zero(q_len):
    out = Case(q_len=q_len).attend(mask=torch.zeros(130, dtype=torch.bool), sinks=torch.zeros(4))
    assert out.eq(0).all()


def random_masks(batch, num_heads, q_len, kv_len):
    """Bool masks of every broadcast shape; the full one has a row and a column in which nothing is visible."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(kv_len,), (q_len, kv_len), (1, 1, 1, kv_len), (batch, 1, 1, kv_len), (1, num_heads, q_len, 1)]
    masks = [torch.rand(shape, generator=generator) < 0.7 for shape in shapes]
    full = torch.rand(batch, num_heads, q_len, kv_len, generator=generator) < 0.7
    full[0, 1, 0] = False
    full[..., 5] = False
    return [*masks, full]


@pytest.mark.parametrize("index", range(6))
@decode_and_prefill
def test_bool_masks_of_any_broadcast_shape(index, q_len):
    Case(q_len=q_len).check(mask=random_masks(2, 4, q_len, 130)[index])


@pytest.mark.parametrize(("index", "dtype"), in_turn(range(6), [torch.float32, torch.bfloat16]))
@decode_and_prefill
def test_float_masks_are_added_to_the_scores(index, q_len, dtype):
    visible = random_masks(2, 4, q_len, 130)[index]
    bias = torch.randn(visible.shape, generator=torch.Generator().manual_seed(1))
    Case(q_len=q_len).check(mask=torch.where(visible, bias, -torch.inf).to(dtype))


@pytest.mark.parametrize(("pair", "q_len"), in_turn(PAIRS, Q_LENS))
def test_a_row_that_sees_no_key_is_zero(pair, q_len):
    mask = torch.ones(q_len, 130, dtype=torch.bool)
    mask[0] = False
    out = Case(*pair, q_len=q_len).attend(mask=mask)
    assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0]))
    assert out.isfinite().all()


@pytest.mark.parametrize("kv_len", [1, 3, 65, 130])
@pytest.mark.parametrize("q_len", [1, 2, 8, 16, 100])
def test_causal_means_the_top_left_triangle(q_len, kv_len):
    Case(q_len=q_len, kv_len=kv_len, heads=(2, 2)).check(is_causal=True)


@decode_and_prefill
def test_the_scale_can_be_given(q_len):
    Case(q_len=q_len).check(scale=0.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@decode_and_prefill
def test_the_output_has_the_dtype_of_the_query(dtype, q_len):
    case = Case(q_len=q_len, dtype=dtype)
    out = case.attend()
    assert out.dtype == dtype
    assert_near(out, case.expected(), tolerance=5e-3)


@pytest.mark.parametrize(
    ("pair", "sizes"),
    in_turn(PAIRS, [(1, 1), (63, 40), (64, 1), (65, 40), (130, 3), (1, 40), (63, 1), (64, 40), (65, 1)]),
)
def test_bytes_beyond_kv_len_have_no_influence(pair, sizes):
    kv_len, q_len = sizes
    mask = torch.rand(kv_len, generator=torch.Generator().manual_seed(0)) < 0.9
    clean = Case(*pair, kv_len=kv_len, capacity=200, q_len=q_len)
    poisoned = Case(*pair, kv_len=kv_len, capacity=200, q_len=q_len, fill=0xFF)
    assert not torch.equal(clean.data[0], poisoned.data[0])
    for options in ({}, {"mask": mask}, {"is_causal": True}):
        assert torch.equal(poisoned.attend(**options), clean.attend(**options))


@pytest.mark.parametrize("number", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("shape", [(100,), (40, 100), (2, 1, 1, 100), (4, 40, 100), (2, 4, 40, 100)])
def test_hidden_keys_have_no_influence_whatever_their_numbers(shape, number):
    """An uninitialised cache may hold such numbers behind its last token."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.9
    mask = torch.cat([mask, mask.new_zeros(*shape[:-1], 30)], -1)
    for key, q_len in (("int8_per_token_head", 40), ("float32", 40), ("int8_per_token_head", 1), ("float32", 1)):
        seen = mask[..., -q_len:, :] if mask.ndim > 1 else mask
        clean, other = Case(key, q_len=q_len), Case(key, q_len=q_len)
        write_tokens_(other.data[0], other.layouts[0], torch.full((2, 2, 30, 64), number), torch.arange(100, 130))
        assert torch.equal(other.attend(mask=seen), clean.attend(mask=seen))
        bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        assert torch.equal(other.attend(mask=bias), clean.attend(mask=bias))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": torch.ones(4)}, {"is_causal": True}])
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 1, 130), (0, 40, 130), (2, 0, 130), (2, 1, 0), (2, 40, 0)])
def test_empty_inputs_give_empty_outputs_or_zeros(batch, q_len, kv_len, options):
    out = Case(batch=batch, q_len=q_len, kv_len=kv_len).attend(**options)
    assert torch.equal(out, torch.zeros(batch, 4, q_len, 64))


def test_arguments_that_do_not_match_are_an_error():
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 KV heads"):
        Case(heads=(3, 2)).attend()
    with pytest.raises(ValueError, match="is_causal excludes a mask"):
        Case().attend(mask=torch.ones(130, dtype=torch.bool), is_causal=True)
    case = Case(kv_len=64)
    case.kv_len = 65
    with pytest.raises(ValueError, match="kv_len 65 is more than 64, the capacity"):
        case.attend()


# Inductor repeats at most 30 operations for several readers. It buffers levels that take more operations to unpack.
BUFFERED = {"int2_per_group_32", "turboquant_2.5bit", "turboquant_3bit", "turboquant_3.5bit_seed7"}
if is_before("2.13"):  # it counts more operations for a look-up among centroids
    BUFFERED |= {"turboquant_4bit", "turboquant_4bit_seed7"}
COMPILED = [("turboquant_4bit", "int4_unrotated")]  # a rotation, centroids, and zero points
FUSED_PAIRS = [
    pytest.param(*pair, marks=() if pair in COMPILED else pytest.mark.slow)
    for pair in PAIRS
    if BUFFERED.isdisjoint(pair)
]


@pytest.mark.parametrize(("key", "value"), FUSED_PAIRS)
@pytest.mark.usefixtures("vector_instructions")
@torch.no_grad()
def test_compiled_decode_agrees_with_eager_and_buffers_nothing_larger_than_the_scores(key, value):
    case = Case(key, value, kv_len=1000, heads=(4, 2), head_dims=(128, 128), batch=1)
    mask = torch.rand(1, 1, 1, 1000, generator=torch.Generator().manual_seed(0)) < 0.9
    out, (code,) = run_and_get_code(case.attend, torch.compile(attend), mask=mask)
    assert_near(out, case.attend(mask=mask), tolerance=1e-5)
    buffers = re.findall(r"empty_strided_cpu\(\(([^)]*)\), \([^)]*\), torch\.(\w+)\)", code)
    sizes = {dtype: 0 for _, dtype in buffers}
    for shape, dtype in buffers:
        sizes[dtype] = max(sizes[dtype], math.prod(int(size) for size in re.findall(r"\d+", shape)))
    scores = 1024 * 4  # capacity times query heads; dequantized keys would be 64 times as large
    rotated = any(layout.format.rotated for layout in case.layouts)
    assert sizes == {"float32": max(scores, 128 * 128 * rotated)}  # 128 * 128: a rotation matrix


@pytest.mark.slow
@torch.no_grad()
def test_compiled_prefill_agrees_with_eager():
    case = Case("int4_per_token_head", "turboquant_4bit", q_len=70, kv_len=70)
    assert_near(case.attend(torch.compile(attend), is_causal=True), case.attend(is_causal=True), tolerance=1e-5)


def symbolic(mode, tensor, *dims):
    """A fake tensor like ``tensor``, with symbolic sizes in the dimensions ``dims``."""
    sizes = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(tensor.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, source=ConstantSource(f"input{id(tensor)}"), symbolic_context=context)


@pytest.mark.parametrize(
    ("q_len", "backend"),
    [(1, "aot_eager"), *(pytest.param(q_len, "inductor", marks=pytest.mark.slow) for q_len in (1, 40))],
)
@torch.no_grad()
def test_one_graph_serves_every_cache_length_capacity_and_batch(q_len, backend):
    def fn(query, k_data, v_data, mask):
        return attend(query, k_data, v_data, *layouts, mask=mask, kv_len=mask.shape[-1])

    def inputs(kv_len, capacity, batch=2):
        case = Case("int4_per_token_head", "fp8_e4m3", q_len=q_len, kv_len=kv_len, capacity=capacity, batch=batch)
        mask = torch.rand(q_len, kv_len, generator=torch.Generator().manual_seed(0)) < 0.9
        return case, (case.query, *case.data, mask)

    case, examples = inputs(130, 200)
    layouts = case.layouts
    dynamic_dims = [(0,), (0, 1), (0, 1), (1,)]
    shape_env = ShapeEnv()
    with enable_python_dispatcher(), FakeTensorMode(shape_env=shape_env) as mode:
        fakes = [symbolic(mode, tensor, *dims) for tensor, dims in zip(examples, dynamic_dims, strict=True)]
        graph = make_fx(fn)(*fakes)
    assert all(isinstance(guard.expr, sympy.Eq) for guard in shape_env.guards)  # equal batches, equal capacities

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(graph, backend=counter, fullgraph=True)
    for sizes in [(130, 200), (128, 128, 3), (127, 128), (129, 640), (190, 192, 5), (600, 1000), (1024, 1024)]:
        case, tensors = inputs(*sizes)
        for tensor, dims in zip(tensors, dynamic_dims, strict=True):
            torch._dynamo.mark_dynamic(tensor, dims)
        assert_near(compiled(*tensors), case.expected(mask=tensors[-1]))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("int8_per_token_head", "fp8_e4m3"),
        pytest.param("turboquant_4bit", "int4_unrotated", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_compiled_step_writes_in_place_and_sees_the_new_tokens(key, value):
    def step(query, k_data, v_data, k, v, position):
        write_tokens_(k_data, k_layout, k, position)
        write_tokens_(v_data, v_layout, v, position)
        return attend(query, k_data, v_data, k_layout, v_layout, kv_len=130)

    case = Case(key, value)
    k_layout, v_layout = case.layouts
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randint(-9, 10, (2, 2, 1, 64), generator=generator).float() for _ in range(2))
    eager = [data.clone() for data in case.data]
    expected = step(case.query, *eager, k, v, torch.tensor([64]))
    compiled = [data.clone() for data in case.data]
    assert_near(torch.compile(step)(case.query, *compiled, k, v, torch.tensor([64])), expected, tolerance=1e-4)
    for actual, wanted, original in zip(compiled, eager, case.data, strict=True):
        assert torch.equal(actual, wanted)
        assert not torch.equal(actual, original)


PART_TOKENS = (64, 0, 130)
"""The tokens of three parts; the second part is empty."""


@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize("kwargs", [{}, {"softcap": 5.0}, {"scale": 300.0}], ids=["plain", "softcap", "large scores"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_parts_of_the_tokens_merge_into_attention_on_all(q_len: int, kwargs: dict, with_sinks: bool) -> None:
    """Each part has its share of the mask, which hides one part and all of the last row."""
    whole = Case("turboquant_4bit", "int8_per_token_head", q_len=q_len, kv_len=sum(PART_TOKENS))
    sinks = torch.randn(4) if with_sinks else None
    mask = torch.rand(q_len, whole.kv_len) < 0.5
    mask[0, : PART_TOKENS[0]] = False
    mask[-1, :] = q_len == 1
    expected = whole.attend(mask=mask, sinks=sinks, **kwargs)
    outs, sums = [], []
    for index, part_of_mask in enumerate(mask.split(PART_TOKENS, 1)):
        first = sum(PART_TOKENS[:index]) // 64
        parts = [data[first : first + -(-PART_TOKENS[index] // 64)] for data in whole.data]
        out, lse = attend_part(
            whole.query, *parts, *whole.layouts, mask=part_of_mask, sinks=sinks if index == 0 else None,
            kv_len=PART_TOKENS[index], **kwargs,
        )  # fmt: skip
        outs.append(out)
        sums.append(lse)
    assert_near(merge_parts(torch.stack(outs), torch.stack(sums)), expected, 2e-5)


def test_a_part_that_no_query_sees_has_no_influence() -> None:
    case = Case()
    out, lse = case.attend(attend_part, mask=torch.zeros(1, case.kv_len, dtype=torch.bool))
    assert not out.any()
    assert torch.equal(lse[..., 0], torch.full((2, 4, 1), -torch.inf))
    assert not merge_parts(out[None], lse[None]).any()
