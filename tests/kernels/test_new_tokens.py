"""Kernels attend to the new tokens of a prompt exactly, as the specification does."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("triton")

from attention_case import BOTH, INT8, Case
from formats_of_every_kind import BY_TOKEN, in_turn
from test_prefill import by_cudnn  # noqa: F401 - a fixture

from kvcompile.kernels import launch
from kvcompile.kernels.attention import launch_prefill
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.new_tokens import NewTokens

NEW = 20
"""More new tokens than the few that are read packed."""

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


class PromptCase(Case):
    """A case whose cache also gets new tokens. They differ from the stored tokens, so a wrong read shows."""

    def with_new(self, slots, num_new=NEW, dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        self.new = [
            NewTokens(
                torch.randn(self.batch, num_new, self.num_kv_heads, layout.head_dim, generator=generator)
                .to(dtype)
                .transpose(1, 2),  # as projections lie in memory
                slots,
            )
            for layout in self.layouts
        ]
        return self

    def kernel(self, mask=None, is_causal=False, sinks=None, softcap=0.0):
        mask, sinks = (None if tensor is None else tensor.to(self.device) for tensor in (mask, sinks))
        keys, values = (NewTokens(*(x.to(self.device) for x in new)) for new in self.new)
        return launch.attention(
            self.query.to(self.device), *[data.to(self.device) for data in self.data], mask, sinks,
            self.kv_len, is_causal, self.scale, softcap, self.key, self.value, self.v_head_dim,
            new_keys=keys, new_values=values,
        ).cpu()  # fmt: skip

    def expected(self, **kwargs):
        keys, values = self.new
        return attend(
            self.query.float(), *self.data, *self.layouts, kv_len=self.kv_len, scale=self.scale,
            new_keys=keys, new_values=values, **kwargs,
        )  # fmt: skip


Prompt = functools.partial(PromptCase, q_len=NEW, bfloat16_tolerance=1e-2)


@pytest.mark.parametrize(("format_name", "dtype"), in_turn(BY_TOKEN, [torch.bfloat16, torch.float16, torch.float32]))
def test_new_tokens_replace_the_stored_tokens_of_every_format(format_name, dtype, device):
    Prompt(device, format_name, format_name, dtype=dtype).with_new(torch.arange(50, 50 + NEW)).check()


def test_exact_blocks_are_replaced_as_well(device):
    case = Prompt(device, "int4_per_channel" + BOTH, "int4_per_token_head" + BOTH, kv_len=200)
    case.with_new(torch.arange(180, 180 + NEW)).check()


@pytest.mark.parametrize("num_new", [17, 63, 64, 65])
def test_any_number_of_new_tokens_has_any_slots(num_new, device):
    case = Prompt(device, "turboquant_4bit", INT8, batch=2, num_kv_heads=2, head_dim=80, v_head_dim=48)
    slots = torch.stack([torch.randperm(130)[:num_new] for _ in range(2)])
    case.with_new(slots, num_new).check()


def test_slots_outside_of_the_cache_are_skipped(device):
    slots = torch.arange(120, 120 + NEW)
    slots[::3] = -1
    case = Prompt(device, INT8, "int4_per_token_head", kv_len=130).with_new(slots)
    case.check()
    everywhere = case.kernel()
    case.with_new(torch.where((slots < 0) | (slots >= 130), -1, slots))
    assert torch.equal(case.kernel(), everywhere)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_causal_prompt_sees_its_own_tokens_up_to_its_position(is_causal, device):
    case = Prompt(device, "int4_per_token_head", "int4_per_token_head", q_len=70, kv_len=70)
    case.with_new(torch.arange(70), 70).check(is_causal=is_causal)


def test_masks_sinks_and_softcap_hold_for_new_tokens(device):
    case = Prompt(device, INT8, INT8, batch=2, num_kv_heads=2, q_len=NEW).with_new(torch.arange(60, 60 + NEW))
    case.check(torch.ones(NEW, 130, dtype=torch.bool).tril(60)[None, None])
    case.check(sinks=torch.tensor([0.5, -20.0, 8.0, float("-inf")]), softcap=5.0)


def test_kv_heads_that_do_not_fit_the_scratch_at_once_get_their_own_new_tokens(device, monkeypatch):
    monkeypatch.setattr(launch_prefill, "SCRATCH_NBYTES", 2 * 192 * 2 * 64 * 2)  # room for two of four KV heads
    Prompt(device, "turboquant_4bit", INT8, batch=2, num_kv_heads=2).with_new(torch.arange(NEW)).check()


def test_cudnn_attends_to_new_tokens(by_cudnn, device):  # noqa: F811
    case = Prompt(device, "turboquant_4bit", INT8, batch=2, num_kv_heads=2, q_len=70, kv_len=70)
    case.with_new(torch.arange(70), 70).check(is_causal=True)
    assert by_cudnn


def test_finite_tokens_stay_finite_in_half_precision(device):
    case = Prompt(device, INT8, INT8, dtype=torch.float16, scale=1e-9).with_new(torch.arange(NEW))
    case.new = [NewTokens(new.x * 1e5, new.slots) for new in case.new]
    assert case.kernel().isfinite().all()
