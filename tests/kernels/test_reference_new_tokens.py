"""The specification attends to the new tokens of a prompt exactly. Few queries read new tokens packed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from formats_of_every_kind import BY_TOKEN
from test_reference_attention import Case, assert_near
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.new_tokens import NewTokens, with_new_tokens
from kvcompile.kernels.spec.packing import read_tokens


def new_tokens(case, n, slots):
    return [NewTokens(torch.randn(2, 2, n, layout.head_dim), slots) for layout in case.layouts]


def expected(case, new, **kwargs):
    """Attention in float64 on dequantized caches in which the new tokens stand."""
    tokens = []
    for data, layout, (x, slots) in zip(case.data, case.layouts, new, strict=True):
        dense = read_tokens(data, layout, case.kv_len).double()
        dense[:, :, slots] = x.double()
        tokens.append(dense)
    return F.scaled_dot_product_attention(case.query.double(), *tokens, enable_gqa=True, **kwargs)


@pytest.mark.parametrize("format_name", BY_TOKEN)
def test_new_tokens_replace_the_stored_tokens_of_every_format(format_name):
    case = Case(format_name, format_name, q_len=40)
    new = new_tokens(case, 40, torch.arange(80, 120))
    assert_near(case.attend(new_keys=new[0], new_values=new[1]), expected(case, new))


@pytest.mark.parametrize("q_len", [0, 1, 16])
def test_few_queries_read_new_tokens_packed(q_len):
    case = Case("int4_per_token_head", "turboquant_4bit", q_len=q_len)
    new = new_tokens(case, 130, torch.arange(130))
    assert torch.equal(case.attend(new_keys=new[0], new_values=new[1]), case.attend())


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 130])
def test_new_tokens_may_fill_any_part_of_the_cache(n):
    case = Case("int4_per_token_head", "turboquant_4bit", q_len=20)
    new = new_tokens(case, n, torch.randperm(130)[:n])
    assert_near(case.attend(new_keys=new[0], new_values=new[1]), expected(case, new))
    assert_near(case.attend(new_keys=new[0], new_values=new[1], softcap=1e6), expected(case, new))


def test_only_keys_or_only_values_may_be_new():
    case = Case(q_len=20)
    keys, values = new_tokens(case, 20, torch.arange(20))
    slots = torch.full((20,), -1)
    assert_near(case.attend(new_keys=keys), case.attend(new_keys=keys, new_values=NewTokens(values.x, slots)), 1e-6)
    assert (case.attend(new_keys=keys) - case.attend()).norm() > 0.1


def test_tokens_without_a_slot_in_the_cache_have_no_influence():
    tokens, x = torch.zeros(2, 1, 30, 4), torch.ones(2, 1, 20, 4)
    slots = torch.arange(20).repeat(2, 1)
    slots[0, 3], slots[1, 4] = -1, 30
    placed = with_new_tokens(tokens, NewTokens(x, slots), q_len=20)
    assert placed.shape == tokens.shape
    assert placed[0, 0, :, 0].nonzero().flatten().tolist() == [i for i in range(20) if i != 3]
    assert placed[1, 0, :, 0].nonzero().flatten().tolist() == [i for i in range(20) if i != 4]
    assert tokens.eq(0).all()


@pytest.mark.parametrize("n", [5, 40])
def test_a_graph_of_any_number_of_tokens_tells_few_queries_at_run_time(n):
    case = Case("int4_per_token_head", "int4_per_token_head", q_len=40)

    def attention(keys, values, query, x, slots):
        new = NewTokens(x, slots)
        return attend(query, keys, values, *case.layouts, kv_len=130, new_keys=new, new_values=new)

    x, slots = torch.randn(2, 2, 40, 64), torch.arange(40)
    traced = make_fx(attention, tracing_mode="symbolic")(*case.data, case.query, x, slots)
    arguments = *case.data, case.query[:, :, :n].contiguous(), x[:, :, :n].contiguous(), slots[:n]
    assert_near(traced(*arguments), attention(*arguments))


WRONG = [
    ({"new_keys": torch.zeros(2, 2, 20, 64)}, "new_keys and new_key_slots are given together"),
    ({"new_keys": torch.zeros(2, 2, 20, 32), "new_key_slots": torch.arange(20)}, r"floating point \[2, 2, n, 64\]"),
    ({"new_keys": torch.zeros(2, 20, 64), "new_key_slots": torch.arange(20)}, r"floating point \[2, 2, n, 64\]"),
    ({"new_keys": torch.zeros(2, 2, 20, 64), "new_key_slots": torch.arange(19)}, r"must be int64 \[20\] or \[2, 20\]"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_new_tokens_are_refused(wrong, message):
    case = Case(q_len=20)
    spec = [layout.spec for layout in case.layouts]
    arguments = (case.query, *case.data, None, None, 130, False, 0.1, 0.0, *spec, 64, None)
    with pytest.raises(ValueError, match=message):
        torch.ops.kvcompile.attention(*arguments, **wrong)


def test_the_operator_agrees_with_the_specification():
    case = Case("turboquant_4bit", "int8_per_token_head", q_len=20)
    keys, values = new_tokens(case, 20, torch.arange(20))
    spec = [layout.spec for layout in case.layouts]
    arguments = (case.query, *case.data, None, None, 130, False, 0.1, 0.0, *spec, 64, None, *keys, *values)
    out = case.attend(new_keys=keys, new_values=values, scale=0.1)
    assert torch.equal(torch.ops.kvcompile.attention(*arguments), out)
    torch.library.opcheck(torch.ops.kvcompile.attention.default, arguments)
