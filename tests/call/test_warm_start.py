"""Another process loads the code of a rewritten graph, and never the code of another policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_steps import growing_step, step
from digest_program import INPUT, SITE, digest, in_this_process, packed_input
from filling_window import classes, compiled, filled, plain_twin, run
from filling_window import step as window_step
from ranks import call_ranks
from shared_fixtures import with_code_of_operators
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import kvcompile
from kvcompile.call.adjacent_parameters import adjacent_of
from kvcompile.compat.autograd_cache import CAN_STORE
from kvcompile.kernels import formats
from kvcompile.kernels.formats.int8 import Int8
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.code_digest import code_digest
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.site import Site

INT8 = "int8_per_token_head"
HEADS, HEAD_DIM, MAX_LEN = 2, 32, 70

pytestmark = pytest.mark.skipif(not CAN_STORE, reason="this release of PyTorch stores no code of a backend")


def stacked_step(q: Tensor, k: Tensor, v: Tensor, stack: Tensor, pos: Tensor) -> Tensor:
    return step(q, k, v, stack[0], stack[1], pos)


class Projecting(nn.Module):
    """Projects queries, keys and values, and keeps its caches in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, HEADS * HEAD_DIM) for _ in range(3))
        for index, cache in enumerate(caches()):
            self.register_buffer(f"cache{index}", cache)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = (project(x).view(1, 1, HEADS, HEAD_DIM).transpose(1, 2) for project in self.projections)
        return step(q, k, v, self.cache0, self.cache1, pos)


def tokens(count: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, HEADS, count, HEAD_DIM)
    return q, k, v


def caches() -> list[Tensor]:
    return [torch.randn(1, HEADS, MAX_LEN, HEAD_DIM) for _ in range(2)]


@pytest.fixture
def cache_on_disk(seed_without_grad: None) -> Iterator[None]:
    """Empty caches of compiled code on disk, and AOTAutograd's cache switched on."""
    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        yield
    torch._dynamo.reset()


def in_new_process(function: Callable[..., Any], *args: Any, policy: Any = INT8, **how: Any) -> tuple[Any, int, int]:
    """The result of a compiled call, and the hits and misses of AOTAutograd's cache, with nothing in memory."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend=kvcompile.kvquant(policy=policy, on_unsupported="error"), **how)
    result = compiled(*args)
    return result, counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]


def copies(values: list[Tensor]) -> list[Tensor]:
    return [value.clone() for value in values]


@dataclass(frozen=True)
class Stored:
    """A call of ``step`` whose code is on disk: its arguments, result and report, and its caches afterwards."""

    new: tuple[Tensor, Tensor, Tensor]
    plain: list[Tensor]
    pos: Tensor
    result: Tensor
    counts: list[int]
    caches: list[Tensor]
    report: kvcompile.Report


@pytest.fixture(scope="module")
def stored() -> Iterator[Stored]:
    """Code is generated once for the tests that find it on disk."""
    stores = torch._functorch.config.patch(enable_autograd_cache=True)
    with fresh_cache(), stores, with_code_of_operators(), torch.no_grad():
        torch.manual_seed(0)
        new, plain, pos = tokens(), caches(), torch.tensor([5])
        with kvcompile.collect_reports() as report:
            result, *counts = in_new_process(step, *new, *(packed := copies(plain)), pos)
        yield Stored(new, plain, pos, result, counts, packed, report)
    torch._dynamo.reset()


def test_stored_code_gives_the_same_answers_caches_and_report(stored: Stored) -> None:
    assert stored.counts == [0, 1]
    with kvcompile.collect_reports() as warm:
        result, *counts = in_new_process(step, *stored.new, *(after := copies(stored.plain)), stored.pos)
    assert counts == [1, 0]
    assert torch.equal(stored.result, result)
    assert all(type(cache) is PackedTensor for cache in after)
    assert all(torch.equal(a.packed, b.packed) for a, b in zip(stored.caches, after, strict=True))
    cold = stored.report
    assert cold.graphs[0].passes
    assert not warm.graphs[0].passes
    assert [graph.sites for graph in warm.graphs] == [graph.sites for graph in cold.graphs]
    assert warm.calls == cold.calls


def test_another_policy_finds_no_stored_code(stored: Stored) -> None:
    other = copies(stored.plain)
    assert in_new_process(step, *stored.new, *other, stored.pos, policy="bfloat16")[1:] == (0, 1)
    assert other[0].packed_layout.format_name == "bfloat16"


@pytest.mark.slow
def test_another_setting_of_pytorch_finds_no_stored_code(cache_on_disk: None) -> None:
    new, plain, pos = tokens(), caches(), torch.tensor([5])
    assert in_new_process(step, *new, *copies(plain), pos)[1:] == (0, 1)
    with torch._inductor.config.patch(epilogue_fusion=False):
        assert in_new_process(step, *new, *copies(plain), pos)[1:] == (0, 1)
    assert in_new_process(step, *new, *copies(plain), pos)[1:] == (1, 0)


def test_stored_code_moves_the_weights_of_merged_projections(cache_on_disk: None) -> None:
    x, pos = torch.randn(1, 1, 16), torch.tensor([5])
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        model = Projecting()
        with with_code_of_operators():
            results.append(in_new_process(model, x, pos, options={"merge_projections": True}))
        assert adjacent_of([project.weight for project in model.projections]) is not None
    (cold, *missed), (warm, *found) = results
    assert (missed, found) == ([0, 1], [1, 0])
    assert torch.equal(cold, warm)


@pytest.mark.slow
def test_stored_code_serves_growing_caches_of_any_length(cache_on_disk: None) -> None:
    compiled = dict.fromkeys(("cold", "warm"))
    for name in compiled:
        torch.manual_seed(1)
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(growing_step, backend=kvcompile.kvquant(policy="float32"), dynamic=True)
        keys, values = (torch.randn(1, HEADS, 3, HEAD_DIM) for _ in range(2))
        outs = []
        for count in (1, 1, 64, 5):
            plain = torch.cat((keys.clone(), (new := tokens(count))[1]), 2)
            out, keys, values = run(*new, keys, values)
            outs.append(out)
            assert torch.equal(keys.clone(), plain)
        assert type(keys) is PackedTensor
        assert keys.shape[2] == 74
        compiled[name] = outs
    assert counters["aot_autograd"]["autograd_cache_hit"] > 0
    assert all(map(torch.equal, compiled["cold"], compiled["warm"]))


@pytest.mark.slow
def test_stored_code_splits_stacks(cache_on_disk: None) -> None:
    new, plain, pos = tokens(), torch.stack(caches()), torch.tensor([5])
    first, *_ = in_new_process(stacked_step, *new, before := plain.clone(), pos)
    second, hits, _ = in_new_process(stacked_step, *new, after := plain.clone(), pos)
    assert hits == 1
    assert torch.equal(first, second)
    assert torch.equal(before.clone(), after.clone())


@pytest.mark.slow
def test_code_travels_as_artifacts_of_pytorch(cache_on_disk: None) -> None:
    new, plain, pos = tokens(), caches(), torch.tensor([5])
    first, *_ = in_new_process(step, *new, *copies(plain), pos)
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    with fresh_cache():
        torch.compiler.load_cache_artifacts(saved[0])
        second, *counts = in_new_process(step, *new, *copies(plain), pos)
    assert counts == [1, 0]
    assert torch.equal(first, second)


def test_debug_runs_every_pass_although_code_is_stored(stored: Stored, tmp_path: Path) -> None:
    with kvcompile.debug(tmp_path / "dump", depyf=False):
        in_new_process(step, *stored.new, *copies(stored.plain), stored.pos)
    assert list((tmp_path / "dump").rglob("*fuse_attention*"))


@pytest.mark.slow
def test_code_for_plain_caches_is_not_found_for_growing_ones(cache_on_disk: None, no_kernels_of_inductor: None) -> None:
    new, pos = tokens(), torch.tensor([5])
    assert in_new_process(step, *new, *caches(), pos)[1:] == (0, 1)
    growing = [
        PackedTensor.from_dense(cache, PackedLayout(INT8, role, HEAD_DIM), growing=True)
        for cache, role in zip(caches(), ("key", "value"), strict=True)
    ]
    assert in_new_process(step, *new, *growing, pos)[1:] == (0, 1)


# The digest


def static_scales(folder: Path, largest: float) -> dict[str, Any]:
    path = folder / "scales.json"
    path.write_text(json.dumps({"version": 1, "largest": {SITE.module: {"key": largest, "value": 1.0}}}))
    return {"default": {"dtype": "fp8_e4m3", "granularity": "per_tensor", "scales": str(path)}}


def test_the_digest_covers_all_that_decides_about_a_graph(tmp_path: Path) -> None:
    variants = [
        digest(),
        digest("int4"),
        digest({"default": {"dtype": INT8}, "residual_length": 64}),
        digest({"default": {"dtype": INT8}, "rules": [{"match": {"layers": 1}, "dtype": "int4"}]}),
        digest(site=Site("model.layers.1.self_attn", 1, "sdpa")),
        digest(known=replace(INPUT, is_persistent=True)),
        digest(known=replace(INPUT, source="L['cache'].layers[1].keys")),
        digest(known=packed_input()),
        digest(known=packed_input("int4_per_token_head")),
        digest(known=packed_input(axes="bthd")),
        digest(known=packed_input(growing=True)),
        digest(conceals=True),
        digest(line=13),
    ]
    assert None not in variants
    assert len(set(variants)) == len(variants)


def test_the_digest_covers_the_content_of_a_file_of_scales(tmp_path: Path) -> None:
    assert digest(static_scales(tmp_path, 2.0)) != digest(static_scales(tmp_path, 4.0))


def test_the_digest_covers_every_line_of_code(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "file.py").write_text("a = 1\n")
    before = code_digest(tmp_path)
    code_digest.cache_clear()
    (tmp_path / "room" / "file.py").write_text("a = 2\n")
    assert code_digest(tmp_path) != before


def test_code_with_a_format_of_the_user_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnFormat(Int8):
        """A format whose code is outside of kvcompile."""

    own = object.__new__(OwnFormat)
    vars(own).update(vars(formats.FORMATS[INT8]))
    monkeypatch.setitem(formats.FORMATS, "own", own)
    assert digest() is None


def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    output, log = tmp_path / "digest.json", tmp_path / "log"
    assert call_ranks("digest_program.py", 1, "cpu", output, log=log) == 0, log.read_text()
    found, hash_of_text = json.loads(output.read_text())
    own, own_hash = in_this_process()
    assert hash_of_text != own_hash, "the processes order sets alike"
    assert found == own is not None


def test_a_window_is_unpacked_by_stored_code(cache_on_disk: None) -> None:
    for is_stored in (False, True):
        torch._dynamo.reset()
        counters.clear()
        with with_code_of_operators():
            function = compiled("int4")
            layers = filled(function, has_full_layer=True)
            expected = plain_twin(layers)
            for _ in range(2):
                run(function, layers, 1), run(window_step, expected, 1)
        assert counters["aot_autograd"]["autograd_cache_hit"] == 3 * is_stored
        assert classes(layers) == {Tensor}
        assert all(map(torch.equal, layers.window, expected.window))
