"""Programs that the fuzzer has found: each of them differed once. Most are smaller than the fuzzer made them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuzz.oracle import check

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_growing_cache_and_a_window_that_drops_tokens_are_told_apart() -> None:
    def step(q, k, v, k0, v0, k1, v1):
        k0, v0 = torch.cat([k0, k], 2), torch.cat([v0, v], 2)
        out = F.scaled_dot_product_attention(q, k0, v0)
        k1, v1 = torch.cat([k1, k], 2)[:, :, -6:], torch.cat([v1, v], 2)[:, :, -6:]
        return out + F.scaled_dot_product_attention(q, k1, v1), k0, v0, k1, v1

    def drive(compile, new):
        run = compile(step)
        caches = [new(2, 2, tokens, 16) for tokens in (4, 4, 6, 6)]
        for _ in range(2):
            q, k, v = new(2, 2, 1, 16), new(2, 2, 1, 16), new(2, 2, 1, 16)
            out, *caches = run(q, k, v, *caches)
            yield out, *caches

    check(drive, policy="float32", dtype="float32", operators=True, dynamic=False)


def test_two_appends_in_a_step_quantize_new_tokens_only() -> None:
    def step(q, k, v, k0, v0):
        k0 = torch.cat([k0, k], 2)
        v0 = torch.cat([torch.cat([v0, v[:, :, :1]], 2), v[:, :, 1:]], 2)
        return F.scaled_dot_product_attention(q, k0, v0), k0, v0

    def drive(compile, new):
        run = compile(step)
        k0 = new.cache("key", "bhtd", 2, 2, 3, 16, growing=True)
        v0 = new.cache("value", "bhtd", 2, 2, 3, 16, growing=True)
        for _ in range(2):
            q, k, v = new(2, 2, 2, 16), new(2, 2, 2, 16), new(2, 2, 2, 16)
            out, k0, v0 = run(q, k, v, k0, v0)
            yield out, k0, v0

    check(drive, policy="int4", dtype="float32", operators=True, dynamic=False)


@pytest.mark.parametrize("starts_packed", [False, True])
def test_a_cache_that_grows_and_is_also_overwritten_stays_plain(starts_packed: bool) -> None:
    def step(c, q, k, v):
        k0, v0 = torch.cat([c["k0"], k], 2), torch.cat([c["v0"], v], 2)
        v0.select(2, 0).zero_()
        out = F.scaled_dot_product_attention(q, k0, v0)
        c["k0"], c["v0"] = k0, v0
        return out

    def drive(compile, new):
        run = compile(step)
        c = {
            name: new.cache(role, "bhtd", 2, 2, 3, 16, growing=True) for name, role in (("k0", "key"), ("v0", "value"))
        }
        for _ in range(2):
            before = c["v0"]
            yield run(c, new(2, 2, 1, 16), new(2, 2, 1, 16), new(2, 2, 1, 16)), c["k0"], c["v0"], before

    check(drive, policy="float32", dtype="float32", operators=True, dynamic=False, starts_packed=starts_packed)


def test_keys_in_a_new_cache_and_values_in_a_written_one_are_read_together() -> None:
    def step(c, q, k, v, pos):
        c["k0"].mul_(0.5)
        k0 = c["k0"].index_copy(2, pos, k)
        v0 = c["v0"].index_copy(2, pos, v)
        mask = torch.arange(k0.shape[2]) <= pos[:, None]
        out = F.scaled_dot_product_attention(q, k0, v0, attn_mask=mask)
        c["k0"], c["v0"] = k0, v0
        return out

    def drive(compile, new):
        run = compile(step)
        c = {name: new.cache(role, "bhtd", 2, 2, 12, 16) for name, role in (("k0", "key"), ("v0", "value"))}
        for position in range(2):
            pos = new.range(position, position + 1)
            yield run(c, new(2, 2, 1, 16), new(2, 2, 1, 16), new(2, 2, 1, 16), pos), c["k0"], c["v0"]

    check(drive, policy="float32", dtype="float32", operators=True, dynamic=False)


@pytest.mark.parametrize(("keys", "values"), [(128, 64), (64, 65), (200, 300)])
def test_key_and_value_caches_of_different_capacities_are_read_together(keys: int, values: int) -> None:
    def step(c, q, k, v, pos):
        c["k0"].index_copy_(2, pos, k)
        c["v0"].index_copy_(2, pos, v)
        return F.scaled_dot_product_attention(q, c["k0"][:, :, :50], c["v0"][:, :, :50])

    def drive(compile, new):
        run = compile(step)
        c = {"k0": new.cache("key", "bhtd", 2, 2, keys, 16), "v0": new.cache("value", "bhtd", 2, 2, values, 16)}
        for position in range(2):
            pos = new.range(position, position + 1)
            yield run(c, new(2, 2, 1, 16), new(2, 2, 1, 16), new(2, 2, 1, 16), pos), c["k0"], c["v0"]

    check(drive, policy="float32", dtype="float32", operators=True, dynamic=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_merged_dimensions_of_a_transposed_cache_are_a_view_in_compiled_code(dynamic: bool) -> None:
    def step(q, k0, v0):
        keys, values = (x.transpose(2, 3).transpose(1, 2).flatten(2) for x in (k0, v0))
        keys, values = (x.unflatten(2, (-1, 8)).transpose(1, 2) for x in (keys, values))
        return F.scaled_dot_product_attention(q, keys, values)

    def drive(compile, new):
        run = compile(step)
        for tokens in (12, 13, 14):
            k0, v0 = (new.cache(role, "bhdt", 2, 2, 16, tokens) for role in ("key", "value"))
            yield run(new(2, 4, 1, 8), k0, v0), k0, v0

    check(drive, policy="float32", dtype="float32", operators=True, dynamic=dynamic, starts_packed=True)
