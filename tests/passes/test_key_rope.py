"""The proof that attention applies RoPE to cached keys: computations that it accepts, and others that it refuses.

Each case is a function from cached keys to the keys of attention. Accepted cases have factors that reproduce the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.compat.inductor import select_decomp_table
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.prove.key_factors import KeyRope, can_apply_rope, partners_of, read_rope

BATCH, HEADS, TOKENS, CHANNELS = 2, 3, 5, 8
Keys = Callable[..., Tensor]


def position() -> Tensor:
    return torch.arange(TOKENS)[:, None]


def angles(channels: int = CHANNELS) -> Tensor:
    return (position() + 1) * 100 ** (-torch.arange(0, channels, 2) / channels)


def tables(channels: int = CHANNELS) -> tuple[Tensor, Tensor]:
    return torch.cat([angles(channels).cos()] * 2, -1), torch.cat([angles(channels).sin()] * 2, -1)


def swapped_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def swapped_neighbours(x: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-odd, even], -1).flatten(-2)


def halves(keys: Tensor) -> Tensor:
    cos, sin = tables(keys.shape[-1])
    return keys * cos + swapped_halves(keys) * sin


def halves_with_another_sign(keys: Tensor) -> Tensor:
    cos, sin = tables()
    return keys * cos - swapped_halves(keys) * sin


def halves_as_olmo_writes_them(keys: Tensor) -> Tensor:
    cos, sin = (table[None, None] for table in tables())
    one, other = keys.float().view(BATCH, HEADS, TOKENS, 2, CHANNELS // 2).unbind(-2)
    return ((keys.float() * cos) + (torch.cat((-other, one), -1) * sin)).to(keys.dtype)


def neighbours(keys: Tensor) -> Tensor:
    cos, sin = (of(angles()).repeat_interleave(2, -1) for of in (torch.cos, torch.sin))
    return keys * cos + swapped_neighbours(keys) * sin


def neighbours_by_slices(keys: Tensor) -> Tensor:
    cos, sin = angles().cos(), angles().sin()
    even, odd = keys[..., ::2], keys[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def complex_numbers(keys: Tensor) -> Tensor:
    numbers = torch.view_as_complex(keys.float().reshape(*keys.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles()), angles())).flatten(3).type_as(keys)


def some_channels(keys: Tensor) -> Tensor:
    return torch.cat([halves(keys[..., :4]), keys[..., 4:]], -1)


def xpos(keys: Tensor) -> Tensor:
    scale = ((torch.arange(0, CHANNELS, 2) / CHANNELS + 0.4) / 1.4) ** (position() / 2)
    return halves(keys) / torch.cat([scale, scale], -1)


def rope_behind_a_permutation(keys: Tensor) -> Tensor:
    return halves(keys.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))


def scaled(keys: Tensor) -> Tensor:
    return keys * 0.3


def turned_channels(keys: Tensor) -> Tensor:
    return torch.cat([keys[..., at : at + 1] for at in range(CHANNELS - 1, -1, -1)], -1) * tables()[0]


def repeated_before(keys: Tensor) -> Tensor:
    return halves(keys[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2))


def repeated_after(keys: Tensor) -> Tensor:
    return halves(keys).repeat_interleave(2, 1)


def merged_sequences_and_heads(keys: Tensor) -> Tensor:
    return halves(keys.flatten(0, 1)).unflatten(0, (BATCH, HEADS))


def tables_of_one_sequence(keys: Tensor) -> Tensor:
    cos, sin = (table[None].expand(BATCH, -1, -1)[:, None] for table in tables())
    return keys * cos + swapped_halves(keys) * sin


PARTNERS: dict[Keys, str] = {
    **dict.fromkeys((halves, halves_with_another_sign, halves_as_olmo_writes_them, xpos), "45670123"),
    **dict.fromkeys((neighbours, neighbours_by_slices, complex_numbers), "10325476"),
    **dict.fromkeys((repeated_before, repeated_after, merged_sequences_and_heads, tables_of_one_sequence), "45670123"),
    some_channels: "23014567",
    scaled: "01234567",
    turned_channels: "76543210",
}


def tables_of_heads(keys: Tensor) -> Tensor:
    return keys * (tables()[0] * torch.arange(1, HEADS + 1)[:, None, None]) + swapped_halves(keys)


def tables_of_sequences(keys: Tensor) -> Tensor:
    cos, sin = (table * torch.arange(1, BATCH + 1)[:, None, None, None] for table in tables())
    return keys * cos + swapped_halves(keys) * sin


def other_pairs_at_odd_tokens(keys: Tensor) -> Tensor:
    odd = (position() % 2).float()
    return keys + swapped_halves(keys) * odd + swapped_neighbours(keys) * (1 - odd)


def pairs_chosen_by_token(keys: Tensor) -> Tensor:
    return torch.where(position() % 2 == 0, swapped_halves(keys), swapped_neighbours(keys))


def three_channels(keys: Tensor) -> Tensor:
    return halves(keys) + swapped_neighbours(keys)


def a_cycle_of_channels(keys: Tensor) -> Tensor:
    return torch.cat([keys[..., 1:3], keys[..., :1], keys[..., 3:]], -1)


def a_shifted_mean(keys: Tensor) -> Tensor:
    return halves(keys) + 1


def normalised(keys: Tensor) -> Tensor:
    return halves(keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + 1e-5))


def scaled_by_themselves(keys: Tensor) -> Tensor:
    return halves(keys) * keys


def rounded_to_integers(keys: Tensor) -> Tensor:
    return halves(keys.to(torch.int32))


def absolute(keys: Tensor) -> Tensor:
    return halves(keys).abs()


def divided(keys: Tensor) -> Tensor:
    return tables()[0] / keys


def shifted_tokens(keys: Tensor) -> Tensor:
    return halves(torch.cat([keys[:, :, 1:], keys[:, :, :1]], 2))


def reversed_tokens(keys: Tensor) -> Tensor:
    return halves(keys.flip(2))


def reversed_heads(keys: Tensor) -> Tensor:
    return halves(keys.flip(1))


def heads_in_turn(keys: Tensor) -> Tensor:
    return halves(keys).repeat(1, 2, 1, 1)


def some_heads(keys: Tensor) -> Tensor:
    return halves(keys[:, 1:])


def the_first_tokens(keys: Tensor) -> Tensor:
    return keys[:, :, :3] * 2


def tokens_in_the_place_of_channels(keys: Tensor) -> Tensor:
    return (keys[..., :TOKENS] * 2).transpose(2, 3)


def repeated_channels(keys: Tensor) -> Tensor:
    return keys[..., :4].repeat_interleave(2, -1)


def half_of_the_channels(keys: Tensor) -> Tensor:
    return halves(keys)[..., :4]


OTHERS = (
    *(tables_of_heads, tables_of_sequences, other_pairs_at_odd_tokens, pairs_chosen_by_token, three_channels),
    *(a_cycle_of_channels, a_shifted_mean, normalised, scaled_by_themselves, rounded_to_integers, absolute, divided),
    *(shifted_tokens, reversed_tokens, reversed_heads, heads_in_turn, some_heads, the_first_tokens),
    *(tokens_in_the_place_of_channels, repeated_channels, half_of_the_channels, rope_behind_a_permutation),
)


def cached(axes: str = "bhtd", dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    sizes = dict(zip("bhtd", (BATCH, HEADS, TOKENS, CHANNELS), strict=True))
    return torch.randn([sizes[axis] for axis in axes]).to(dtype)


def rope_of(compute: Keys, keys: Tensor, axes: str = "bhtd") -> tuple[KeyRope | None, list[Tensor]]:
    """The proven RoPE, and the values of its coefficients."""
    gm = make_fx(compute, decomposition_table=select_decomp_table(), tracing_mode="fake")(keys)
    gm.graph.eliminate_dead_code()
    (root,) = gm.graph.find_nodes(op="placeholder")
    between = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and not {root, *between}.isdisjoint(node.all_input_nodes):
            between.append(node)
    rope = read_rope(root, axes, gm.graph.output_node().args[0], between)
    run = torch.fx.Interpreter(gm, garbage_collect_values=False)
    run.run(keys)
    return rope, [run.env[node] for node in rope.keys.coefficients] if rope is not None else []


def with_rope(rope: KeyRope, coefficients: list[Tensor], keys: Tensor) -> Tensor:
    """``keys``, [batch, heads, tokens, channels], after RoPE by the factors."""
    of_own, of_partner = rope.factors(coefficients, TOKENS, torch.device("cpu"))
    partners = list(rope.partners)
    return keys * of_own + (keys * of_partner)[..., partners]


@pytest.mark.parametrize("compute", PARTNERS, ids=lambda compute: compute.__name__)
def test_rope_is_proven_whatever_its_formula(compute: Keys) -> None:
    keys = cached()
    rope, coefficients = rope_of(compute, keys)
    assert rope is not None
    assert "".join(map(str, rope.partners)) == PARTNERS[compute]
    expected = compute(keys)
    repeats = expected.shape[1] // HEADS
    result = with_rope(rope, coefficients, keys).repeat_interleave(repeats, 1)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", ["bthd", "bhdt", "tbhd"])
def test_the_dimensions_of_the_cache_may_have_any_order(axes: str) -> None:
    def compute(keys: Tensor) -> Tensor:
        return halves(keys.permute([axes.index(axis) for axis in "bhtd"]))

    keys = cached(axes)
    rope, coefficients = rope_of(compute, keys, axes)
    assert rope is not None
    plain = keys.permute([axes.index(axis) for axis in "bhtd"])
    torch.testing.assert_close(with_rope(rope, coefficients, plain), compute(keys), rtol=1e-5, atol=1e-5)


def test_factors_are_not_rounded_where_the_model_rounds_keys() -> None:
    keys = cached(dtype=torch.bfloat16)
    rope, coefficients = rope_of(halves_as_olmo_writes_them, keys)
    assert rope is not None
    of_own, _ = rope.factors(coefficients, TOKENS, torch.device("cpu"))
    assert of_own.dtype == torch.float32
    assert torch.equal(of_own, tables()[0])


@pytest.mark.parametrize("compute", OTHERS, ids=lambda compute: compute.__name__)
def test_other_keys_are_not_proven(compute: Keys) -> None:
    assert rope_of(compute, cached())[0] is None


@pytest.mark.parametrize(
    ("rows", "partners"),
    [
        (["10", "01"], (0, 1)),
        (["01", "10"], (1, 0)),
        (["11", "01"], (1, 0)),
        (["010", "001", "100"], None),
        (["110", "011", "001"], None),
        (["111", "010", "001"], None),
    ],
)
def test_a_channel_has_one_partner_in_both_directions(rows: list[str], partners: tuple[int, ...] | None) -> None:
    assert partners_of(torch.tensor([[char == "1" for char in row] for row in rows])) == partners


@pytest.mark.parametrize(
    ("format_name", "device", "shape", "is_fused"),
    [
        ("int8_per_token_head", "cpu", (1, 4, 1, 64), True),
        ("turboquant_4bit", "cpu", (1, 4, 1, 64), False),
        ("turboquant_4bit", "cuda", (1, 4, 1, 128), True),
        ("turboquant_4bit", "cuda", (1, 4, 1, 256), False),
        ("turboquant_4bit_mean", "cuda", (1, 4, 1, 128), False),
    ],
)
def test_attention_applies_rope_to_formats_that_a_kernel_rotates_back(
    format_name: str, device: str, shape: tuple[int, ...], is_fused: bool
) -> None:
    query = Graph().placeholder("query")
    query.meta["val"] = SimpleNamespace(shape=shape, device=torch.device(device))
    layout = PackedLayout.parse(format_name, "key", shape[3])
    assert can_apply_rope(query, layout) == is_fused
