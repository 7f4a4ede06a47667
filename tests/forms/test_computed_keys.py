"""Keys that are computed from a cache in every step, for example by RoPE after the cache.

The caches are packed. Attention applies a proven RoPE to packed keys; other keys are computed from caches that are
dequantized where the model reads them. Compiled steps equal plain code in a lossless format, and eager code on packed
caches in a lossy one. Graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.prove.fuse_computed import ROPE_NOTE

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 2, 4, 2, 32, 70
WEIGHT = torch.linspace(0.5, 1.5, HEAD_DIM)
LOSSLESS, LOSSY = {"default": {"dtype": "float32"}}, "int8_per_token_head"

Step = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def angles(pos: Tensor, channels: int) -> Tensor:
    return pos[:, None] * 10000 ** (-torch.arange(0, channels, 2) / channels)


def rotate_halves(x: Tensor, pos: Tensor) -> Tensor:
    cos, sin = (torch.cat([of(angles(pos, x.shape[-1]))] * 2, -1) for of in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_pairs(x: Tensor, pos: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turns = angles(pos, x.shape[-1])
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(turns), turns)).flatten(-2).type_as(x)


def rotate_neighbours(x: Tensor, pos: Tensor) -> Tensor:
    cos, sin = (of(angles(pos, x.shape[-1])).repeat_interleave(2, -1) for of in (torch.cos, torch.sin))
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-odd, even], -1).flatten(-2) * sin


def rotate_stacked(x: Tensor, pos: Tensor) -> Tensor:
    """This RoPE ends with a stack of channels, not with a sum."""
    cos, sin = (of(angles(pos, x.shape[-1])) for of in (torch.cos, torch.sin))
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def rotate_last_channels(x: Tensor, pos: Tensor) -> Tensor:
    return torch.cat([x[..., :16], rotate_halves(x[..., 16:], pos)], -1)


def normalise(x: Tensor, pos: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def normalise_and_rotate(x: Tensor, pos: Tensor) -> Tensor:
    return rotate_halves(normalise(x, pos), pos)


def layer_norm(x: Tensor, pos: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


COMPUTED = (
    rotate_halves,
    rotate_pairs,
    rotate_neighbours,
    rotate_stacked,
    rotate_last_channels,
    normalise,
    normalise_and_rotate,
    layer_norm,
)


def visible(pos: Tensor, kv_len: int = MAX_LEN) -> Tensor:
    return torch.arange(kv_len) <= pos[:, None]


def attend(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, keys.shape[2]), enable_gqa=True)


def roles_dequantized_in(graph: torch.fx.Graph) -> list[str]:
    """The roles of the caches that an operator dequantizes."""
    calls = graph.find_nodes(op="call_function", target=torch.ops.kvcompile.dequantize.default)
    return [role for call in calls for role in call.args if role in ("key", "value")]


def rows(n: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(BATCH, heads, n, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    return q, k, v


def caches(tokens: int = MAX_LEN, axes: str = "bhtd") -> list[Tensor]:
    sizes = {"b": BATCH, "h": NUM_KV_HEADS, "t": tokens, "d": HEAD_DIM}
    return [torch.randn([sizes[axis] for axis in axes]) for _ in range(2)]


def packed(given: Sequence[Tensor], axes: str = "bhtd") -> list[Tensor]:
    layouts = (PackedLayout(LOSSY, role, HEAD_DIM) for role in ("key", "value"))
    return [PackedTensor.from_dense(x, layout, axes) for x, layout in zip(given, layouts, strict=True)]


def compiled(step: Step, policy: Any, **options: Any) -> Step:
    options = {"policy": policy, "on_unsupported": "error", **options}
    result: Step = torch.compile(step, backend="kvquant", options=options)
    return result


def static_step(compute: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
        return attend(compute(q, pos), compute(keys, torch.arange(keys.shape[2])), values, pos)

    return step


def growing_step(compute: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None) -> Any:
        keys, values = k * 2, v * 2
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        pos = torch.arange(keys.shape[2] - q.shape[2], keys.shape[2])
        return attend(compute(q, pos), compute(keys, torch.arange(keys.shape[2])), values, pos), (keys, values)

    return step


def in_another_order(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(1, pos, k.transpose(1, 2)), values.index_copy_(1, pos, v.transpose(1, 2))
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    return attend(rotate_halves(q, pos), rotate_halves(keys, torch.arange(MAX_LEN)), values, pos)


def written_through_a_view(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    return attend(rotate_halves(q, pos), rotate_halves(keys, torch.arange(MAX_LEN)), values, pos)


def repeated_and_written_out(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    rotated = rotate_halves(keys, torch.arange(MAX_LEN)).repeat_interleave(2, 1)
    scores = rotate_halves(q, pos) @ rotated.mT * 0.3
    return scores.masked_fill(~visible(pos), -torch.inf).softmax(-1) @ values.repeat_interleave(2, 1)


def normalised_and_repeated(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(1, pos, k.transpose(1, 2)), values.index_copy_(1, pos, v.transpose(1, 2))
    keys, values = normalise(keys, pos).transpose(1, 2), values.transpose(1, 2)
    return attend(q, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), pos)


def unwritten_keys_are_zeroed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    is_written = torch.arange(MAX_LEN)[:, None] <= pos[-1]
    return attend(q, torch.where(is_written, keys, 0.0), values, pos)


STEPS_OF = {compute: static_step(compute) for compute in COMPUTED}
STATIC = {
    **dict.fromkeys(STEPS_OF.values(), "bhtd"),
    in_another_order: "bthd",
    written_through_a_view: "bthd",
    repeated_and_written_out: "bhtd",
    normalised_and_repeated: "bthd",
    unwritten_keys_are_zeroed: "bhtd",
}
UNPROVEN = [
    *(STEPS_OF[compute] for compute in (normalise, normalise_and_rotate, layer_norm)),
    normalised_and_repeated,
    unwritten_keys_are_zeroed,
]
IDS = [*(compute.__name__ for compute in COMPUTED), *(step.__name__ for step in [*STATIC][len(COMPUTED) :])]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("step", "is_lossless"),
    [
        pytest.param(
            step,
            is_lossless,
            id=f"{name}-{'lossless' if is_lossless else 'lossy'}",
            marks=() if is_lossless == (at % 2 == 0) else pytest.mark.slow,
        )
        for at, (step, name) in enumerate(zip(STATIC, IDS, strict=True))
        for is_lossless in (True, False)
    ],
)
def test_attention_on_keys_that_are_computed_from_their_cache_is_packed(step: Step, is_lossless: bool) -> None:
    given = caches(axes=STATIC[step])
    expected = [x.clone() for x in given] if is_lossless else packed(given, STATIC[step])
    q, k, v = rows(3)
    pos = torch.arange(63, 66)
    with kvcompile.collect_reports() as report:
        found = compiled(step, LOSSLESS if is_lossless else LOSSY)(q, k, v, *given, pos)
    torch.testing.assert_close(found, step(q, k, v, *expected, pos), rtol=1e-5, atol=1e-5)
    for cache, other in zip(given, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        other = other.dequantize() if isinstance(other, PackedTensor) else other
        assert torch.equal(cache.dequantize(), other)
    (site,) = report.sites
    assert site.attention.endswith("keys computed from their cache" if step in UNPROVEN else ROPE_NOTE)
    assert [cache.role for cache in site.caches] == ["key", "value"]


@pytest.mark.parametrize(
    ("compute", "lengths"),
    [
        (rotate_halves, (62, 1, 1, 1, 1)),
        (normalise, (62, 2, 2)),
        pytest.param(rotate_halves, (62, 1, 1, 1, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_growing_caches_of_such_keys_are_packed_from_the_first_call_on(
    compute: Callable[..., Tensor], lengths: tuple[int, ...]
) -> None:
    """One graph serves the prompt, one serves all steps of one token, and one serves all steps of two tokens."""
    step = growing_step(compute)
    run = compiled(step, LOSSLESS)
    past = expected = None
    for n in lengths:
        q, k, v = rows(n)
        out, past = run(q, k, v, past)
        result, expected = step(q, k, v, expected)
        torch.testing.assert_close(out, result, rtol=1e-5, atol=1e-5)
        for cache, other in zip(past, expected, strict=True):
            assert isinstance(cache, PackedTensor)
            assert torch.equal(cache.dequantize(), other)
    assert counters["stats"]["unique_graphs"] == len(set(lengths))


@pytest.mark.parametrize(
    ("q_len", "policy", "dequantized"),
    [
        (1, LOSSY, ["key"]),
        (8, "turboquant_4bit", ["key"]),
        (9, LOSSY, ["key", "value"]),
    ],
)
def test_a_step_of_few_queries_reads_packed_values_beside_computed_keys(
    q_len: int, policy: str, dequantized: list[str], rewritten_graphs: list[torch.fx.Graph]
) -> None:
    """Two query heads share a KV head, so that 8 queries are 16 rows."""
    compiled(static_step(normalise), policy)(*rows(q_len), *caches(), torch.arange(q_len))
    assert roles_dequantized_in(rewritten_graphs[-1]) == dequantized


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_computed_keys_are_attended_to_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    given = [x.to(dtype) for x in caches()]
    arguments, pos, step = [x.to(dtype) for x in rows(1)], torch.arange(MAX_LEN - 1, MAX_LEN), static_step(layer_norm)
    expected = step(*arguments, *packed(given), pos)
    found = compiled(step, LOSSY)(*arguments, *given, pos)
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * torch.finfo(dtype).eps)


def test_keys_in_double_precision_are_attended_to_as_the_model_does() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
        return attend(q.double(), normalise(keys.double(), pos), values.double(), pos)

    given, arguments, pos = caches(), rows(1), torch.arange(MAX_LEN - 1, MAX_LEN)
    expected = step(*arguments, *packed(given), pos)
    found = compiled(step, LOSSY)(*arguments, *given, pos)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_values_with_exact_tokens_are_read_beside_computed_keys() -> None:
    policy = {"default": {"dtype": LOSSY}, "residual_length": 64, "sink_tokens": 64}
    given, pos, step = caches(150), torch.arange(149, 150), static_step(normalise)
    arguments = rows(1)
    exact = step(*arguments, *(x.clone() for x in given), pos)
    found = compiled(step, policy)(*arguments, *given, pos)
    assert all(isinstance(cache, PackedTensor) and cache.packed_layout.residual is not None for cache in given)
    read = [cache.dequantize() for cache in given]
    torch.testing.assert_close(found, step(*arguments, *read, pos), rtol=1e-5, atol=1e-5)
    assert (found - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("compute", [lambda x, pos: x, rotate_halves, normalise], ids=["as cached", "RoPE", "norm"])
def test_layers_that_read_one_cache_read_it_in_the_format_of_the_first(compute: Callable[..., Tensor]) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
            return attend(q, compute(keys, torch.arange(MAX_LEN)), values, pos)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

        def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> list[Tensor]:
            keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
            return [layer(q, keys, values, pos) for layer in self.layers]

    policy = {"rules": [{"match": {"layers": "1"}, "dtype": "turboquant_4bit"}], "default": {"dtype": LOSSY}}
    given, arguments, pos, model = caches(), rows(1), torch.arange(MAX_LEN - 1, MAX_LEN), Model()
    expected = model(*arguments, *packed(given), pos)
    found = compiled(model, policy)(*arguments, *given, pos)
    assert [cache.format_name for cache in given] == [LOSSY, LOSSY]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def the_query_is_computed_from_it(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    return attend(q + keys[:, :1, :1], rotate_halves(keys, torch.arange(MAX_LEN)), values, pos)


def the_mask_is_computed_from_it(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    mask = visible(pos) & (keys[:, :1, None, :, 0] < 1)
    rotated = rotate_halves(keys, torch.arange(MAX_LEN))
    return F.scaled_dot_product_attention(q, rotated, values, attn_mask=mask, enable_gqa=True)


def the_cache_is_added_up(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    return attend(q, rotate_halves(keys, torch.arange(MAX_LEN)), values, pos) + keys.sum()


def the_old_cache_is_rotated(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    rotated = rotate_halves(keys, torch.arange(MAX_LEN))
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    return attend(q, rotated, values, pos)


def the_cache_is_scaled_afterwards(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor
) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    out = attend(q, rotate_halves(keys, torch.arange(MAX_LEN)), values, pos)
    keys.mul_(0.5)
    return out


def the_values_are_computed_too(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    return attend(q, rotate_halves(keys, torch.arange(MAX_LEN)), values * 2, pos)


def other_heads_take_part(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    return attend(q, keys + keys.mean(1, keepdim=True), values, pos)


def other_tokens_take_part(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    return attend(q, keys + torch.cat([keys[:, :, -1:], keys[:, :, :-1]], 2), values, pos)


def tokens_of_a_copy_are_zeroed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    keys = keys.clone()
    keys[:, :, 0] = 0
    return attend(q, keys, values, pos)


def a_head_of_a_copy_is_zeroed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    keys = keys.clone()
    keys[:, 0] = 0
    return attend(q, keys, values, pos)


def unwritten_tokens_are_zeroed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    is_written = torch.arange(MAX_LEN)[:, None] <= pos[-1]
    return attend(q, torch.where(is_written, keys, 0.0), torch.where(is_written, values, 0.0), pos)


def tokens_are_sorted(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    return attend(q, keys.sort(2).values, values, pos)


def another_graph_computes_the_keys(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor
) -> Tensor:
    keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
    return attend(q, torch.cond(pos[0] > 0, lambda x: x * 2, lambda x: x + 1, (keys,)), values, pos)


def keys_are_computed_from_the_values(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor
) -> Tensor:
    values.index_copy_(2, pos, v)
    return attend(q, rotate_halves(values, torch.arange(MAX_LEN)), values, pos)


UNSAFE: dict[Step, str] = {
    the_query_is_computed_from_it: "used_elsewhere",
    the_mask_is_computed_from_it: "used_elsewhere",
    the_cache_is_added_up: "used_elsewhere",
    the_old_cache_is_rotated: "read_before_write",
    the_cache_is_scaled_afterwards: "written_after_read",
    the_values_are_computed_too: "computed_from_cache",
    other_heads_take_part: "computed_from_cache",
    other_tokens_take_part: "computed_from_cache",
    tokens_of_a_copy_are_zeroed: "computed_from_cache",
    a_head_of_a_copy_is_zeroed: "computed_from_cache",
    unwritten_tokens_are_zeroed: "computed_from_cache",
    tokens_are_sorted: "computed_from_cache",
    another_graph_computes_the_keys: "computed_from_cache",
    keys_are_computed_from_the_values: "computed_from_cache",
}


@pytest.mark.parametrize("step", UNSAFE, ids=lambda step: step.__name__)
def test_other_uses_of_such_caches_are_refused_and_stay_right(step: Step) -> None:
    given = caches()
    expected, (q, k, v), pos = [x.clone() for x in given], rows(3), torch.arange(3, 6)
    with kvcompile.collect_reports() as report:
        found = compiled(step, LOSSY, on_unsupported="ignore")(q, k, v, *given, pos)
    assert [site.reason_code for site in report.sites] == [UNSAFE[step]]
    for one, other in zip((found, *given), (step(q, k, v, *expected, pos), *expected), strict=True):
        assert type(one) is Tensor
        assert torch.equal(one, other)


@pytest.mark.usefixtures("operators_traced")
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_channels_of_a_head_may_begin_as_a_symbol(dynamic: bool) -> None:
    """All inputs are arguments, and the weight of a norm makes the symbol a number while Dynamo traces."""

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        normalised = keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + 1e-5) * WEIGHT
        return F.scaled_dot_product_attention(q, normalised, values, enable_gqa=True), keys, values

    given = (*rows(1), *caches(tokens=20))
    expected = step(*given)[0]
    with torch.no_grad(), kvcompile.collect_reports() as report:
        compiled = torch.compile(step, backend="kvquant", options={"policy": LOSSY}, dynamic=dynamic)
        out, keys, values = compiled(*given)
    assert [site.reason for site in report.sites] == [None]
    assert type(keys) is type(values) is PackedTensor
    assert (out - expected).norm() < 0.02 * expected.norm()
