"""Packed caches in calibrated formats, in which every KV head has a separate basis."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_bases import based
from tiny_llama import attention_llama
from torch import Tensor
from transformers import StaticCache

import kvcompile
from kvcompile import PackedTensor
from kvcompile.compat.recompiling import with_new_code
from kvcompile.errors import CacheFileError
from kvcompile.evaluation.transforms import calibrate_transforms
from kvcompile.kernels.formats import bases
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.policy.transforms import Origin, Transforms
from kvcompile.report.report import collect_reports

HEADS, HEAD_DIM = 4, 32
NAMES = ["transform_6540", "turboquant_4bit_mean"]
every_format = pytest.mark.parametrize("name", NAMES)
pytestmark = pytest.mark.usefixtures("seed_without_grad")


def layout_of(name: str, residual: Residual | None = None) -> PackedLayout:
    return PackedLayout(based(name, HEADS, HEAD_DIM).name, "key", HEAD_DIM, residual)


def cache_of(name: str, tokens: int = 70, axes: str = "bhtd", residual: Residual | None = None) -> PackedTensor:
    shape = [{"b": 2, "h": HEADS, "t": tokens, "d": HEAD_DIM}[axis] for axis in axes]
    return PackedTensor.from_dense(torch.randn(shape), layout_of(name, residual), axes)


def stored(x: torch.Tensor, name: str) -> torch.Tensor:
    """Vectors [batch, heads, tokens, head_dim] as a cache returns them."""
    fmt = layout_of(name).format
    return fmt.decode(fmt.encode(x))


@every_format
@pytest.mark.parametrize("axes", ["bhtd", "bthd", "tbhd", "thd"])
def test_every_order_of_dimensions_stores_each_head_in_its_basis(name: str, axes: str) -> None:
    shape = [{"b": 2, "h": HEADS, "t": 5, "d": HEAD_DIM}[axis] for axis in axes]
    x = torch.randn(shape)
    cache = PackedTensor.from_dense(x, layout_of(name), axes)
    expected = cache.from_stored_axes(stored(cache.to_stored_axes(x), name))
    torch.testing.assert_close(cache.dequantize(), expected)


@every_format
def test_slices_of_heads_are_packed_views_of_the_same_values(name: str) -> None:
    cache = cache_of(name)
    whole = cache.dequantize()
    for view, expected in (
        (cache[:, 1:3], whole[:, 1:3]),
        (cache[:, 2], whole[:, 2]),
        (cache[:, :, 3:9], whole[:, :, 3:9]),
        (cache[:, 1:][:, 1:2], whole[:, 2:3]),
    ):
        assert isinstance(view, PackedTensor)
        torch.testing.assert_close(view.dequantize(), expected)
    cache[:, 1:3] = torch.ones(())
    whole[:, 1:3] = stored(torch.ones(2, HEADS, 70, HEAD_DIM), name)[:, 1:3]
    torch.testing.assert_close(cache.dequantize(), whole)


@every_format
def test_selected_joined_and_repeated_heads_are_plain(name: str) -> None:
    cache = cache_of(name)
    whole = cache.dequantize()
    for made, expected in (
        (cache.index_select(1, torch.tensor([2, 0])), whole[:, [2, 0]]),
        (torch.cat([cache, cache], 1), torch.cat([whole, whole], 1)),
        (cache[:, ::2], whole[:, ::2]),
        (cache.repeat_interleave(2, 1), whole.repeat_interleave(2, 1)),
    ):
        values = made.dequantize() if hasattr(made, "dequantize") and type(made) is not torch.Tensor else made
        torch.testing.assert_close(values, expected)


@every_format
def test_every_form_of_write_encodes_each_head_in_its_basis(name: str) -> None:
    cache = cache_of(name)
    whole, x = cache.dequantize(), torch.randn(2, HEADS, 3, HEAD_DIM)
    new = stored(x, name)
    cache.index_copy_(2, torch.tensor([1, 5, 69]), x)
    whole[:, :, [1, 5, 69]] = new
    cache[:, torch.tensor([3, 1]), torch.tensor([7, 8])] = x[:, [3, 1], [0, 1]]
    whole[:, [3, 1], [7, 8]] = new[:, [3, 1], [0, 1]]
    cache.index_fill_(1, torch.tensor([2, 0]), 0.5)
    whole[:, [2, 0]] = stored(torch.full_like(whole, 0.5), name)[:, [2, 0]]
    cache[1, :, 10:13] = x[1]
    whole[1, :, 10:13] = new[1]
    cache[0, 2, 20, 5] += 1.0  # a part of a vector
    whole[0, 2, 20, 5] += 1.0
    whole[0, 2, 20] = stored(whole, name)[0, 2, 20]
    cache[:, :, 30:40].zero_()
    whole[:, :, 30:40] = 0
    cache[:, :, 40:42].fill_(2.0)
    whole[:, :, 40:42] = stored(torch.full_like(whole, 2.0), name)[:, :, 40:42]
    torch.testing.assert_close(cache.dequantize(), whole)


@every_format
def test_copies_keep_the_bytes(name: str) -> None:
    cache = cache_of(name)
    for copy in (cache.clone(), torch.cat([cache, cache])[:2], cache.index_select(0, torch.tensor([0, 1]))):
        assert isinstance(copy, PackedTensor)
        torch.testing.assert_close(copy.dequantize(), cache.dequantize(), rtol=0, atol=0)


@every_format
def test_a_cache_with_exact_tokens_reads_them_exactly(name: str) -> None:
    residual = Residual(1, 1, torch.float32)
    x = torch.randn(2, HEADS, 200, HEAD_DIM)
    cache = PackedTensor.from_dense(x, layout_of(name, residual))
    read, expected = cache.dequantize(), stored(x, name)
    torch.testing.assert_close(read[:, :, 64:192], expected[:, :, 64:192])
    assert torch.equal(read[:, :, :64], x[:, :, :64])
    assert torch.equal(read[:, :, 192:], x[:, :, 192:])


def save_two_files(name: str, folder: Path) -> Tensor:
    """A cache in two files, whole and in part; returns its values [2, HEADS, 70, HEAD_DIM]."""
    cache = cache_of(name)
    kvcompile.save_cache({"whole": cache, "part": cache[:, 1:3]}, folder / "cache.safetensors")
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    (folder / "pickle.pt").write_bytes(buffer.getvalue())
    return cache.dequantize()


@every_format
@pytest.mark.parametrize("file", ["cache.safetensors", "pickle.pt"])
def test_a_file_holds_the_basis(name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = save_two_files(name, tmp_path)
    reference = cache_of(name).format_name.partition("@")[2]
    monkeypatch.setattr(bases, "_BASES", {})
    bases.find.cache_clear()
    with pytest.raises(ValueError, match="is not loaded"):
        bases.find(reference)
    if file == "pickle.pt":
        loaded = {"whole": torch.load(tmp_path / file)}
    else:
        loaded = kvcompile.load_cache(tmp_path / file)
        torch.testing.assert_close(loaded["part"].dequantize(), values[:, 1:3])
    torch.testing.assert_close(loaded["whole"].dequantize(), values)


@pytest.mark.slow
@every_format
def test_a_process_that_knows_no_basis_reads_both_files(name: str, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    torch.save(save_two_files(name, tmp_path), tmp_path / "values.pt")
    program = f"""
import torch, kvcompile
loaded = kvcompile.load_cache({str(file)!r})
values = torch.load({str(tmp_path / "values.pt")!r})
torch.testing.assert_close(loaded["whole"].dequantize(), values)
torch.testing.assert_close(loaded["part"].dequantize(), values[:, 1:3])
torch.testing.assert_close(torch.load({str(tmp_path / "pickle.pt")!r}).dequantize(), values)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_file_with_another_basis_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cache.safetensors"
    kvcompile.save_cache(cache_of("transform_6540"), file)
    monkeypatch.setattr("kvcompile.kernels.formats.bases.register", lambda basis: "0" * 12)
    with pytest.raises(CacheFileError, match="the digest"):
        kvcompile.load_cache(file)


@pytest.fixture(scope="module")
def transforms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Transforms of the tiny Llama, from random tokens."""
    model, generator = attention_llama(num_layers=1), torch.Generator().manual_seed(0)
    windows = torch.randint(0, 97, (4, 60), generator=generator)
    tensors, least, largest = calibrate_transforms(model, windows, context=200)
    origin = Origin(
        model="tiny", fingerprint="", text="", text_digest="", windows=4, tokens=60, positions=(least, largest)
    )
    path = tmp_path_factory.mktemp("calibrated") / "transforms.safetensors"
    Transforms(str(path), origin, tensors).save(path)
    return path


EXACT = {"sink_tokens": 64, "residual_length": 64}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "extra", "generated"),
    [
        ("transform_6665", EXACT, False),
        ("turboquant_4bit_nc_mean", {}, False),
        pytest.param("transform_6665", {}, False, marks=pytest.mark.slow),
        pytest.param("turboquant_4bit_nc_mean", EXACT, False, marks=pytest.mark.slow),
        pytest.param("transform_6665", {}, True, marks=pytest.mark.slow),
        pytest.param("transform_6665", EXACT, True, marks=pytest.mark.slow),
        pytest.param("turboquant_4bit_nc_mean", {}, True, marks=pytest.mark.slow),
        pytest.param("turboquant_4bit_nc_mean", EXACT, True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_packs_calibrated_caches_and_equals_eager_attention(
    dtype: str, extra: dict[str, Any], generated: bool, transforms: Path, request: pytest.FixtureRequest
) -> None:
    if not generated:
        request.getfixturevalue("without_code_generation")
    model = attention_llama(num_layers=1)
    policy = kvcompile.Policy.load({"default": {"dtype": dtype, "transforms": str(transforms)}, **extra})
    ids = torch.randint(0, 97, (2, 90))

    def step(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        return model(ids, past_key_values=cache).logits

    def run(step: Any) -> torch.Tensor:
        cache = kvcompile.static_cache(model, 2, 128, policy)
        return torch.cat([step(model, ids[:, begin:end], cache) for begin, end in ((0, 88), (88, 89), (89, 90))], 1)

    with collect_reports() as report:
        compiled = run(torch.compile(with_new_code(step, "step"), backend="kvquant", options={"policy": policy}))
    assert all(site.rewritten for site in report.sites)
    torch.testing.assert_close(compiled, run(step), rtol=1e-3, atol=1e-3)
    exact = model(ids).logits
    assert (compiled - exact).norm() / exact.norm() < 0.2


@pytest.mark.usefixtures("without_code_generation")
def test_a_model_with_other_heads_is_refused(transforms: Path) -> None:
    model = attention_llama(num_layers=1, num_key_value_heads=4)
    policy = {"default": {"dtype": "transform_6665", "transforms": str(transforms)}, "on_unsupported": "ignore"}
    cache = StaticCache(config=model.config, max_cache_len=64)
    with collect_reports() as report:
        compiled = torch.compile(
            with_new_code(lambda model, ids, cache: model(ids, past_key_values=cache).logits, "other"),
            backend="kvquant", options={"policy": policy},
        )  # fmt: skip
        compiled(model, torch.randint(0, 97, (1, 8)), cache)
    assert all("calibrated for 2 KV heads of 64 channels" in str(site.reason) for site in report.sites)
    assert report.sites
