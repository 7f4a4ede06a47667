"""A rewritten graph that differs from its original is refused when it is compiled, with a dump; others run packed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvcompile
from kvcompile.errors import OptionsError
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.passes.rewrite import caches
from kvcompile.verification import dump
from kvcompile.verification.pair import without_loss

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation", "dumps_in_tmp_path")

B, H, S, D = 2, 2, 70, 64


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where dumps are written."""
    monkeypatch.setattr(dump.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, scale: float | None = None) -> Tensor:
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    visible = torch.arange(kc.shape[2], device=q.device) <= pos[:, None]
    return F.scaled_dot_product_attention(q, kc, vc, visible, scale=scale, enable_gqa=True)


def two_layers(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, kd: Tensor, vd: Tensor, pos: Tensor) -> Tensor:
    return step(step(q, k, v, kc, vc, pos, scale=0.3), k, v, kd, vd, pos)


def inputs(num_caches: int = 2, tokens: int = 3) -> tuple[Any, ...]:
    q, k, v = torch.randn(B, 4, tokens, D), torch.randn(B, H, tokens, D), torch.randn(B, H, tokens, D)
    return q, k, v, *(torch.randn(B, H, S, D) for _ in range(num_caches)), torch.arange(5, 5 + tokens)


def compiled(function: Any, policy: str = "float32", **options: Any) -> Any:
    return torch.compile(function, backend=kvcompile.kvquant(policy=policy, verify=True, **options))


def without_scale(insert_attention: Any) -> Any:
    """A fault of the rewrite that shows at attention with another scale than the default."""

    def faulty(graph: Any, marker: Any, *args: Any) -> Any:
        object.__setattr__(marker, "scale", None)
        return insert_attention(graph, marker, *args)

    return mock.patch.object(caches, "insert_attention", faulty)


@pytest.mark.parametrize("policy", ["float32", "int4", "turboquant_4bit_nc"])
def test_a_right_rewrite_runs_packed_and_the_report_says_how_often_it_was_compared(policy: str) -> None:
    args, state = inputs(), torch.get_rng_state()
    run = compiled(step, policy)
    run(*args)
    report = kvcompile.last_report()
    assert report.is_verified
    assert report.totals.rewritten == 1
    assert isinstance(args[3], kvcompile.PackedTensor)
    assert re.search(r"verified: 9 random steps", str(report))
    assert report.to_dict()["graphs"][0]["verified_steps"] == 9
    assert report.graphs[0].passes["verify"] > 0
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers stay the same"


def test_without_the_option_nothing_is_verified() -> None:
    torch.compile(step, backend=kvcompile.kvquant(policy="float32"))(*inputs())
    report = kvcompile.last_report()
    assert not report.is_verified
    assert report.graphs[0].verified_steps is None


def test_the_site_that_differs_is_refused_and_the_others_stay_packed(folder: Path) -> None:
    args = inputs(4)
    expected = two_layers(*(arg.clone() for arg in args))
    with without_scale(caches.insert_attention):
        result = compiled(two_layers, on_unsupported="ignore")(*args)
    torch.testing.assert_close(result, expected)
    report = kvcompile.last_report()
    first, second = report.sites
    assert (first.reason_code, second.reason_code) == ("differs", None)
    assert "the result of attention" in str(first.reason)
    assert [type(cache) is kvcompile.PackedTensor for cache in args[3:7]] == [False, False, True, True]
    assert not report.is_verified
    (dumped,) = folder.iterdir()
    assert str(dumped) in str(first.reason)
    assert {path.name for path in dumped.iterdir()} == {"index.md", "original.py", "rewritten.py", "policy.yaml"}
    index = (dumped / "index.md").read_text()
    assert "L['pos']: input, int64 [3]" in index
    assert "the result of attention: " in index
    assert "_packed" in (dumped / "rewritten.py").read_text()


def test_a_rewritten_graph_that_raises_is_refused() -> None:
    def fails(graph: Any, marker: Any, k_data: Any, *args: Any) -> Any:
        out = insert(graph, marker, k_data, *args)
        return graph.call_function(_raise, (out,)) if out is None else _checked(graph, out)

    def _checked(graph: Any, out: Any) -> Any:
        node = graph.call_function(torch.ops.aten.index_select.default, (out, 0, out.args[0]))
        node.meta["val"] = out.meta["val"]
        return node

    def _raise(x: Any) -> Any:
        raise ValueError

    insert = caches.insert_attention
    args = inputs()
    expected = step(*(arg.clone() for arg in args))
    with mock.patch.object(caches, "insert_attention", fails):
        result = compiled(step, on_unsupported="ignore")(*args)
    torch.testing.assert_close(result, expected)
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == "differs"
    assert "the rewritten graph raises" in str(site.reason)


@torch.library.custom_op("kvcompile_test::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    if not bool((x > 0).all()):
        raise ValueError("not positive")
    return x.clone()


positive.register_fake(torch.empty_like)


def test_a_graph_that_takes_no_random_numbers_is_refused_as_not_verified() -> None:
    def picky(q: Tensor, *others: Any) -> Tensor:
        return step(positive(q), *others)

    q, *others = inputs()
    compiled(picky, on_unsupported="ignore")(q.abs() + 1, *others)
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == "not_verified"
    assert "ValueError" in str(site.reason)


def test_a_grown_cache_is_the_input_of_the_next_step() -> None:
    def grow(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor) -> Any:
        kc, vc = torch.cat([kc, k], 2), torch.cat([vc, v], 2)
        return F.scaled_dot_product_attention(q, kc, vc), kc, vc

    run = compiled(grow)
    cache = torch.randn(B, H, 3, D), torch.randn(B, H, 3, D)
    for _ in range(3):  # the second length makes it a symbol
        _, *cache = run(*torch.randn(3, B, H, 1, D).unbind(), *cache)
        assert kvcompile.last_report().is_verified


@pytest.mark.usefixtures("operators_traced")
def test_a_cache_that_has_grown_and_only_serves_reads_keeps_the_blocks_of_its_buffer() -> None:
    """The cross-attention of LED: a fixed length, and a buffer with more blocks than these tokens need."""
    heads, channels = 4, 16

    def grow(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor) -> Any:
        kc, vc = torch.cat([kc, k], 2), torch.cat([vc, v], 2)
        return F.scaled_dot_product_attention(q, kc, vc), kc, vc

    def attend(q: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
        keys, values = kc.view(B * heads, 9, channels), vc.view(B * heads, 9, channels)
        return torch.softmax(q.view(-1, 1, channels) @ keys.transpose(1, 2), -1) @ values

    new, old = torch.randn(3, B, heads, 1, channels), torch.randn(2, B, heads, 8, channels)
    with torch.no_grad():
        _, *cache = compiled(grow)(*new.unbind(), *old.unbind())
        assert all(x.growing and x.packed.shape[0] == 2 for x in cache)
        compiled(attend, on_unsupported="ignore")(new[0], *cache)
    assert [site.reason for site in kvcompile.last_report().sites] == [None]
    assert kvcompile.last_report().is_verified


def test_the_stand_in_keeps_exact_blocks() -> None:
    layout = PackedLayout("int4_per_channel", "key", 64, Residual(0, 1, torch.float16))
    assert without_loss(layout, torch.float16) == PackedLayout("float16", "key", 64, layout.residual)


def test_verify_leaves_the_arguments_unchanged() -> None:
    args = inputs()
    before = [arg.clone() for arg in args]
    report = kvcompile.verify(step, *args, policy="int8_per_token_head")
    assert report.is_verified
    assert all(type(arg) is Tensor and torch.equal(arg, old) for arg, old in zip(args, before, strict=True))


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_the_option_is_a_bool(given: Any) -> None:
    with pytest.raises(OptionsError, match="verify: expected True or False"):
        kvcompile.kvquant(options={"verify": given})
    assert kvcompile.kvquant(verify=True) != kvcompile.kvquant()


def test_compile_passes_the_option_on() -> None:
    module = torch.nn.Module()
    module.forward = step  # type: ignore[method-assign]
    kvcompile.compile(module, policy="float32", verify=True)(*inputs())
    assert kvcompile.last_report().is_verified


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["", "cudagraphs"])
@pytest.mark.parametrize("policy", ["bfloat16", "int4", "turboquant_4bit_nc"])
def test_kernels_are_verified_on_a_gpu(policy: str, options: dict[str, Any]) -> None:
    args = [arg.cuda().bfloat16() if arg.is_floating_point() else arg.cuda() for arg in inputs()]
    backend = kvcompile.kvquant(policy=policy, options={"verify": True, **options})
    torch.compile(step, backend=backend)(*args)
    report = kvcompile.last_report()
    assert report.is_verified, report
    args = [arg.cuda() for arg in inputs(4)]
    torch._dynamo.reset()
    with without_scale(caches.insert_attention):
        compiled(two_layers, on_unsupported="ignore")(*args)
    assert [site.reason_code for site in kvcompile.last_report().sites] == ["differs", None]
