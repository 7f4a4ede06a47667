"""A function of ``aot_compile`` is stored in a file, and gives the same answers and caches where it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import paged_steps
import pytest
import torch
from calibrated_bases import based
from decode_steps import growing_step, step
from shared_fixtures import with_code_of_operators
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import kvcompile
from kvcompile import OptionsError, PackageError
from kvcompile.call import packed_call, stored_call
from kvcompile.call.adoption import AdoptionError
from kvcompile.compat.ahead_of_time import CAN_STORE_CALLS
from kvcompile.kernels.formats import bases
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.code_digest import code_digest
from kvcompile.packed.tensor import PackedTensor

INT8 = "int8_per_token_head"
HEADS, HEAD_DIM, MAX_LEN = 2, 32, 70

WRONG_ROLE = (
    r"keys: the stored function takes a cache in int8_per_token_head for keys \[bhtd\], not int8_per_token_head for "
    r"values \[bhtd\]; make a function for it with aot_compile"
)

pytestmark = [
    pytest.mark.skipif(not CAN_STORE_CALLS, reason="this release of PyTorch stores no function of another backend"),
    pytest.mark.usefixtures("compiling_ahead"),
]


@pytest.fixture
def compiling_ahead(seed_without_grad: None) -> Iterator[None]:
    with torch._dynamo.config.patch(enable_aot_compile=True), with_code_of_operators():
        yield
    torch._dynamo.reset()


class Decoder(nn.Module):
    """A step of attention whose caches are buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, MAX_LEN, HEAD_DIM))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        return step(q, k, v, self.keys, self.values, pos)


def tokens(count: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, HEADS, count, HEAD_DIM)
    return q, k, v


def plain_caches() -> list[Tensor]:
    return [torch.randn(1, HEADS, MAX_LEN, HEAD_DIM) for _ in range(2)]


def packed(caches: Sequence[Tensor], format_name: str = INT8, **how: Any) -> list[Tensor]:
    roles = ("key", "value")
    return [
        PackedTensor.from_dense(cache, PackedLayout.parse(format_name, role, HEAD_DIM), **how)
        for cache, role in zip(caches, roles, strict=True)
    ]


def bytes_of(caches: Sequence[Any]) -> list[Tensor]:
    return [cache.packed for cache in caches]


def all_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def compiled_ahead(function: Callable[..., Any], args: Sequence[Any], policy: Any = INT8, **how: Any) -> Any:
    """The function of ``aot_compile`` for ``args``."""
    backend = kvcompile.kvquant(policy=policy, on_unsupported="error", options=how.pop("inductor", None))
    compiled = torch.compile(function, backend=backend, fullgraph=True, **how)
    ahead = compiled.forward if isinstance(function, nn.Module) else compiled
    return ahead.aot_compile((tuple(args), {}))


def loaded(path: Path) -> Any:
    torch._dynamo.reset()
    with fresh_cache(), path.open("rb") as file:
        return torch.compiler.load_compiled_function(file)


def saved_and_loaded(function: Any, folder: Path) -> Any:
    function.save_compiled_function(str(folder / "step.bin"))
    return loaded(folder / "step.bin")


@pytest.fixture(scope="module")
def on_packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A function for packed caches, and its file: compiled once for several tests."""
    path = tmp_path_factory.mktemp("stored") / "step.bin"
    setting = torch._dynamo.config.patch(enable_aot_compile=True)
    with setting, torch.no_grad(), with_code_of_operators():
        function = compiled_ahead(step, [*tokens(), *packed(plain_caches()), torch.tensor([5])])
        function.save_compiled_function(str(path))
        yield function, path
    torch._dynamo.reset()


def test_a_loaded_function_gives_the_same_answers_and_caches(on_packed: tuple[Any, Path]) -> None:
    function, path = on_packed
    plain = plain_caches()
    first, second = packed(plain), packed(plain)
    again = loaded(path)
    for position in (3, 4, 69):
        new, pos = tokens(), torch.tensor([position])
        assert torch.equal(function(*new, *first, pos), again(*new, *second, pos))
    assert all_equal(bytes_of(first), bytes_of(second))


def test_loading_gives_the_graph_to_the_report_and_calls_are_counted(on_packed: tuple[Any, Path]) -> None:
    with kvcompile.collect_reports() as report:
        function = loaded(on_packed[1])
        function(*tokens(), *packed(plain_caches()), torch.tensor([5]))
    (graph,) = report.graphs
    assert [site.rewritten for site in graph.sites] == [True]
    assert not graph.passes
    assert graph.origin is not None
    assert graph.origin.policy == INT8
    assert report.calls == 1


@pytest.mark.parametrize("has_guards", [True, False])
def test_a_cache_in_another_format_is_refused(on_packed: tuple[Any, Path], has_guards: bool) -> None:
    """Keys and values have equally many bytes, so the function could read each of them as the other."""
    function = loaded(on_packed[1])
    if not has_guards:
        function.disable_guard_check()
    keys, values = packed(plain_caches())
    before = [cache.clone() for cache in bytes_of([keys, values])]
    with pytest.raises(RuntimeError, match="Guard") if has_guards else pytest.raises(PackageError, match=WRONG_ROLE):
        function(*tokens(), values, keys, torch.tensor([5]))
    assert all_equal(before, bytes_of([keys, values]))


def test_a_file_of_other_code_is_refused(on_packed: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_call, "_made_with", lambda: "kvcompile 7")
    with pytest.raises(PackageError, match=r"was stored with kvcompile .* and this process has kvcompile 7; call"):
        loaded(on_packed[1])


def test_the_code_of_all_three_folders_is_part_of_a_file() -> None:
    assert code_digest() in stored_call._made_with()
    assert torch.__version__ in stored_call._made_with()


def first_and_later(model: Decoder, new: Any, folder: Path) -> tuple[Tensor, Tensor]:
    """The outputs of the first two calls of a model with plain caches. Both functions are stored."""
    pos = torch.tensor([0]), torch.tensor([1])
    first = compiled_ahead(model, [*new, pos[0]])
    first.save_compiled_function(str(folder / "first.bin"))
    outputs = [first(model, *new, pos[0])]
    later = compiled_ahead(model, [*new, pos[1]])
    later.save_compiled_function(str(folder / "later.bin"))
    return outputs[0], later(model, *new, pos[1])


def run_stored(folder: Path) -> None:
    """Run both functions of :func:`first_and_later`, in a process that traces nothing."""
    model = Decoder()
    new, expected, caches = torch.load(folder / "expected.pt")
    with torch.no_grad():
        for position, name in enumerate(("first.bin", "later.bin")):
            with (folder / name).open("rb") as file:
                function = torch.compiler.load_compiled_function(file)
            assert torch.equal(function(model, *new, torch.tensor([position])), expected[position])
    assert all_equal(bytes_of([model.keys, model.values]), caches)


@pytest.mark.slow
def test_another_process_packs_plain_caches_and_goes_on_with_packed_ones(tmp_path: Path) -> None:
    model, new = Decoder(), tokens()
    with kvcompile.collect_reports() as report:
        outputs = first_and_later(model, new, tmp_path)
    assert "plain caches (self.keys, self.values): the first call of the function packs them" in report.remarks[0]
    assert len(report.remarks) == 1
    torch.save((new, outputs, bytes_of([model.keys, model.values])), tmp_path / "expected.pt")
    code = f"from pathlib import Path; from test_ahead_of_time import run_stored; run_stored(Path({str(tmp_path)!r}))"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "no_code"),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_packed_is_an_error_because_nothing_is_traced_later(tmp_path: Path) -> None:
    function = saved_and_loaded(compiled_ahead(step, [*tokens(), *plain_caches(), torch.tensor([5])]), tmp_path)
    caches = plain_caches()
    view = caches[0][0]
    with pytest.raises(AdoptionError, match="another tensor on its storage is in use"):
        function(*tokens(), *caches, torch.tensor([5]))
    assert view.shape == caches[0].shape[1:]
    assert all(type(cache) is Tensor for cache in caches)


def test_caches_that_grow_grow_in_a_loaded_function(tmp_path: Path) -> None:
    def prompt() -> list[Tensor]:
        return packed([torch.ones(1, HEADS, 3, HEAD_DIM) for _ in range(2)], growing=True)

    function = compiled_ahead(growing_step, [*tokens(), *prompt()], dynamic=True)
    again = saved_and_loaded(function, tmp_path)
    outputs = []
    for run in (function, again):
        torch.manual_seed(1)
        keys, values = prompt()
        for _ in range(70):
            out, keys, values = run(*tokens(), keys, values)
        assert keys.shape[2] == 73
        assert type(keys) is PackedTensor
        outputs.append((out, keys.clone(), values.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def stacked_step(q: Tensor, k: Tensor, v: Tensor, stack: Tensor, pos: Tensor) -> Tensor:
    return step(q, k, v, stack[0], stack[1], pos)


def test_a_stack_of_caches_is_split_in_a_loaded_function(tmp_path: Path) -> None:
    plain, new, pos = torch.stack(plain_caches()), tokens(), torch.tensor([5])
    first = compiled_ahead(stacked_step, [*new, one := plain.clone(), pos])
    second = saved_and_loaded(first, tmp_path)
    assert torch.equal(first(*new, one, pos), second(*new, other := plain.clone(), pos))
    assert torch.equal(one.clone(), other.clone())
    assert all_equal(bytes_of(one.parts), bytes_of(other.parts))
    on_packed = compiled_ahead(stacked_step, [*new, one, pos])
    third = saved_and_loaded(on_packed, tmp_path)
    assert torch.equal(on_packed(*new, one, pos), third(*new, other, pos))
    assert all_equal(bytes_of(one.parts), bytes_of(other.parts))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", [paged_steps.index_copy_and_index, paged_steps.heads_before_tokens])
def test_paged_pools_are_served_in_their_format(fn: paged_steps.Step, tmp_path: Path) -> None:
    pools = paged_steps.plain_pools(fn)
    (new, places), first, second = paged_steps.inputs(1, 3), *(paged_steps.reference_pools(pools) for _ in range(2))
    function = compiled_ahead(fn, [*new, *first, *places])
    again = saved_and_loaded(function, tmp_path)
    assert torch.equal(function(*new, *first, *places), again(*new, *second, *places))
    assert all(torch.equal(a.clone(), b.clone()) for a, b in zip(first, second, strict=True))
    again.disable_guard_check()
    with pytest.raises(PackageError, match="takes a cache in int8_per_token_head for keys"):
        again(*new, *reversed(second), *places)


def sum_after_write(cache: Tensor, x: Tensor) -> Tensor:
    cache[:, :, 3] = x
    return cache.sum()


def test_a_step_without_attention_may_use_a_packed_cache(tmp_path: Path) -> None:
    first, second = (packed(plain_caches())[0] for _ in range(2))
    second.copy_(first)
    x = torch.randn(1, HEADS, HEAD_DIM)
    function = compiled_ahead(sum_after_write, [first, x])
    again = saved_and_loaded(function, tmp_path)
    assert torch.equal(function(first, x), again(second, x))
    assert all_equal(bytes_of([first]), bytes_of([second]))


def test_a_loaded_function_can_be_stored_again(on_packed: tuple[Any, Path], tmp_path: Path) -> None:
    again = saved_and_loaded(loaded(on_packed[1]), tmp_path)
    args, caches = [*tokens(), torch.tensor([5])], plain_caches()
    first, second = packed(caches), packed(caches)
    assert torch.equal(on_packed[0](*args[:3], *first, args[3]), again(*args[:3], *second, args[3]))
    assert all_equal(bytes_of(first), bytes_of(second))


@pytest.mark.slow
def test_the_numbers_of_a_calibrated_format_travel_with_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = based("int3_unrotated_mean", HEADS, HEAD_DIM).name
    plain, new, pos = plain_caches(), tokens(), torch.tensor([5])
    caches = packed(plain, name), packed(plain, name)
    function = compiled_ahead(step, [*new, *caches[0], pos], policy="bfloat16")
    function.save_compiled_function(str(tmp_path / "step.bin"))
    output = function(*new, *caches[0], pos)
    monkeypatch.setattr(bases, "_BASES", {})
    bases.find.cache_clear()
    again = loaded(tmp_path / "step.bin")
    assert torch.equal(again(*new, *caches[1], pos), output)
    assert all_equal(bytes_of(caches[0]), bytes_of(caches[1]))


def test_keys_with_outliers_are_noted_in_a_loaded_function(tmp_path: Path) -> None:
    policy = "turboquant_4bit_nc"
    function = compiled_ahead(step, [*tokens(), *plain_caches(), torch.tensor([5])], policy)
    again = saved_and_loaded(function, tmp_path)
    caches = plain_caches()
    caches[0][..., :2] *= 100
    with kvcompile.collect_reports() as report:
        again(*tokens(), *caches, torch.tensor([69]))
    assert any("its keys have outlier channels" in remark for remark in report.remarks)


def test_a_step_without_a_cache_is_stored_as_plain_code(tmp_path: Path) -> None:
    x = torch.randn(3)
    again = saved_and_loaded(compiled_ahead(torch.nn.functional.silu, [x]), tmp_path)
    assert torch.equal(again(x), torch.nn.functional.silu(x))


def test_the_loaded_code_has_the_settings_of_inductor_that_it_was_compiled_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*tokens(), *packed(plain_caches()), torch.tensor([5])]
    function = compiled_ahead(step, args, inductor={"triton.cudagraphs": True})
    function.save_compiled_function(str(tmp_path / "step.bin"))
    seen = []
    monkeypatch.setattr(
        packed_call.PackedCall, "__init__", lambda *args: seen.append(torch._inductor.config.triton.cudagraphs)
    )
    loaded(tmp_path / "step.bin")
    assert seen == [True]
    assert not torch._inductor.config.triton.cudagraphs


def test_a_setting_that_cannot_be_pickled_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    args = [*tokens(), *packed(plain_caches()), torch.tensor([5])]
    function = compiled_ahead(step, args, inductor={"post_grad_custom_post_pass": lambda graph: None})
    with pytest.raises(PackageError, match=r"cannot be stored: .*; pass options of Inductor that can be pickled"):
        function.save_compiled_function(str(tmp_path / "step.bin"))


def test_a_step_whose_code_pytorch_does_not_keep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_call, "is_kept", lambda compiled: False)
    with pytest.raises(OptionsError, match=r"keeps no code of it; compile it with torch\.compile, or store it with"):
        compiled_ahead(torch.nn.functional.silu, [torch.randn(3)])


def test_formats_of_other_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_call, "has_only_own_formats", lambda: False)
    with pytest.raises(OptionsError, match="aot_compile cannot store a step while formats of other packages"):
        compiled_ahead(step, [*tokens(), *packed(plain_caches()), torch.tensor([5])])


def test_steps_of_several_ranks_are_refused() -> None:
    with pytest.raises(OptionsError, match="aot_compile cannot store a step of several ranks"):
        stored_call.check_storable(is_divided=True)
