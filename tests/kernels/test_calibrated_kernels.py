"""Kernels agree with the specification on words of unequal planes, and on calibrated formats."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from calibrated_bases import based

from kvcompile.kernels import calibrated, launch
from kvcompile.kernels.change_of_basis import changed
from kvcompile.kernels.formats import is_calibrated
from kvcompile.kernels.lang.recipes import Recipe, Repeated
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.packing import read_tokens, to_cache_dtype, write_tokens_

WORDS = [("uniform_531", 96), ("uniform_4321", 128), ("uniform_421", 96), ("uniform_52", 64),
         ("uniform_6", 32), ("uniform_5433", 64), ("uniform_63", 128)]  # fmt: skip
CALIBRATED = ["transform_4321", "transform_4200", "turboquant_3bit_mean", "int4_unrotated_mean"]
PAIRS = [("transform_4321", "transform_4200"), ("turboquant_3bit_mean", "int3_unrotated_mean"),
         ("transform_5300", "int4_per_token_head"), ("int8_per_token_head", "transform_5310")]  # fmt: skip

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def vectors(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_bytes(layout, tokens, batch, heads):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, layout.shape(tokens, batch, heads), dtype=torch.uint8, generator=generator)


def assert_close_bytes(layout, actual, expected):
    """Codes and scale bytes differ by at most one step, and rarely: sums have another order."""
    actual, expected = layout.split(actual.cpu()), layout.split(expected)
    for name in ("scale",):
        distance = (actual[name].int() - expected[name].int()).abs()
        assert distance.max() <= 1
        assert (distance > 0).float().mean() < 0.01
    planes = zip(layout.format.packing.planes(actual), layout.format.packing.planes(expected), strict=True)
    for plane, (a, b) in enumerate(planes):
        levels = [layout.format.levels(codes, plane) for codes in (a, b)]
        assert (levels[0] != levels[1]).float().mean() < 0.01


@pytest.mark.parametrize(("name", "head_dim"), WORDS)
@pytest.mark.parametrize("role", ["key", "value"])
def test_words_are_stored_as_by_the_specification(name, head_dim, role, device):
    layout = PackedLayout(name, role, head_dim)
    for tokens, start in ((1, 63), (70, 60)):
        x, positions = vectors(1, 2, tokens, head_dim) * 3, torch.arange(start, start + tokens)
        x[0, 0, 0, :5] = 0
        x[0, 1, -1] = 0
        if tokens > 1:
            x[0, 0, 5, 3], x[0, 1, 7, 1] = torch.nan, torch.inf
        expected = random_bytes(layout, 140, 1, 2)
        data = expected.to(device, copy=True)
        write_tokens_(expected, layout, x, positions)
        launch.store(data, x.to(device), positions.to(device), None, layout.spec, role)
        assert_close_bytes(layout, data, expected)


@pytest.mark.parametrize(("name", "head_dim"), WORDS)
@pytest.mark.parametrize("role", ["key", "value"])
def test_words_are_dequantized_as_by_the_specification(name, head_dim, role, device):
    layout = PackedLayout(name, role, head_dim)
    data = torch.full(layout.shape(130, 1, 2), 0xFF, dtype=torch.uint8)
    write_tokens_(data, layout, vectors(1, 2, 70, head_dim), torch.arange(70))
    actual = launch.dequantize(data.to(device), 70, torch.float32, layout.spec, role, head_dim).cpu()
    torch.testing.assert_close(actual, read_tokens(data, layout, 70), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("uniform_531", "uniform_52"),
        ("uniform_421", "uniform_63"),
        ("uniform_4321", "uniform_5433"),  # four neighbouring columns of keys need different shifts
    ],
)
def test_attention_on_words_agrees_with_the_specification(key, value, dtype, device):
    layouts = PackedLayout(key, "key", 96), PackedLayout(value, "value", 64)
    query, data = vectors(2, 4, 1, 96).to(dtype), []
    for layout in layouts:
        packed = torch.full(layout.shape(200, 2, 2), 0xFF, dtype=torch.uint8)
        write_tokens_(packed, layout, vectors(2, 2, 130, layout.head_dim), torch.arange(130))
        data.append(packed)
    actual = launch.attention(
        query.to(device), *[x.to(device) for x in data], None, None, 130, False, 0.2, 0.0, key, value, 64
    ).cpu()
    expected = attend(query.float(), *data, *layouts, kv_len=130, scale=0.2)
    assert (actual.float() - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("role", ["key", "value"])
def test_calibrated_formats_are_stored_and_read_as_by_the_specification(name, role, device):
    layout = PackedLayout(based(name, num_heads=2, head_dim=64).name, role, 64)
    x, positions = vectors(1, 2, 70, 64), torch.arange(60, 130)
    x[0, 1, 3] = 0
    expected = torch.zeros(layout.shape(140, 1, 2), dtype=torch.uint8)
    data = expected.to(device, copy=True)
    write_tokens_(expected, layout, x, positions)
    calibrated.store(data, x.to(device), positions.to(device), None, layout.spec, role)
    stored, wanted = read_tokens(data.cpu(), layout, 140), read_tokens(expected, layout, 140)
    assert ((stored - wanted).abs().amax(-1) > 1e-3).float().mean() < 0.05  # ties
    assert torch.equal(stored[0, 1, 63], torch.zeros(64))
    actual = calibrated.dequantize(expected.to(device), 140, torch.float16, layout.spec, role, 64).cpu()
    torch.testing.assert_close(actual, to_cache_dtype(wanted, torch.float16), rtol=2e-3, atol=2e-3)
    assert torch.equal(actual[:, :, :60], torch.zeros(1, 2, 60, 64, dtype=torch.float16))


@pytest.mark.parametrize("name", ["transform_4321", "transform_4200", "int4_unrotated_mean"])
@pytest.mark.parametrize(("batch", "q_len"), [(1, 1), (3, 5), (2, 65)])
def test_one_kernel_changes_the_basis_as_the_format_does(name, batch, q_len, device):
    fmt = based(name, num_heads=2, head_dim=96)
    stored = fmt.stored_dim(96) if fmt.has_matrices else 96
    for matrix, mean, channels in (
        ("query", "none", 96),
        ("to_stored", "before", 96),
        ("from_stored", "after", stored),
    ):
        if matrix == "query" and not fmt.has_matrices:
            continue
        x = vectors(batch, q_len, 6, channels).transpose(1, 2)  # three query heads for each KV head
        x[0, 1, 0] = 0
        x[-1, 2, -1, 7] = torch.nan
        heads = x.unflatten(1, (2, 3))
        is_zero = (heads == 0).all(-1, keepdim=True)
        if matrix == "query":
            expected = fmt.query_in_plain(heads)
        elif matrix == "to_stored":
            expected = torch.where(is_zero, 0.0, fmt.to_plain(heads))
        else:
            original = fmt.from_plain(heads)
            expected = torch.where(is_zero, 0.0, original + fmt.mean(original))
        actual = changed(x.to(device), fmt, 2, matrix, mean, torch.float32).cpu()
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected.flatten(1, 2), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_many_vectors_change_their_basis_as_few_do(device, monkeypatch):
    fmt = based("transform_4321", num_heads=2, head_dim=64)
    layout = PackedLayout(fmt.name, "key", 64)
    results = []
    for most in (64, 63):
        monkeypatch.setattr(calibrated, "MOST_VECTORS", most)
        data = torch.zeros(layout.shape(64, 1, 2), dtype=torch.uint8, device=device)
        calibrated.store(
            data, vectors(1, 2, 64, 64).to(device), torch.arange(64, device=device), None, layout.spec, "key"
        )
        results.append(data.cpu())
    assert_close_bytes(layout, *results)


def test_a_step_in_a_calibrated_format_is_repeated_without_its_python_code(device):
    if device.type == "cpu":
        pytest.skip("the interpreter has no compiled kernels")
    fmt = based("transform_4321", num_heads=2, head_dim=64)
    layout = PackedLayout(fmt.name, "key", 64)
    data = torch.zeros(layout.shape(64, 1, 2), dtype=torch.uint8, device=device)
    expected = data.clone()
    store = Repeated(calibrated.store)
    for position in range(5):
        x, positions = vectors(1, 2, 1, 64, seed=position).to(device), torch.tensor([position], device=device)
        store(data, x, positions, None, layout.spec, "key")
        calibrated.store(expected, x, positions, None, layout.spec, "key")
    assert [type(recipe) for recipe in store._recipes.values()] == [Recipe]
    assert torch.equal(data, expected)


@pytest.mark.parametrize(
    ("pair", "q_len"),
    [
        *((pair, 1) for pair in PAIRS),
        *((pair, 8) for pair in PAIRS[::2]),
        *(pytest.param(pair, 70, marks=pytest.mark.slow) for pair in PAIRS),
    ],
    ids=str,
)
def test_attention_on_calibrated_formats_agrees_with_the_specification(pair, q_len, device):
    names = [based(name, num_heads=2, head_dim=64).name if is_calibrated(name) else name for name in pair]
    layouts = PackedLayout(names[0], "key", 64), PackedLayout(names[1], "value", 64)
    query, data = vectors(2, 4, q_len, 64).bfloat16(), []
    for layout in layouts:
        packed = torch.full(layout.shape(200, 2, 2), 0xFF, dtype=torch.uint8)
        write_tokens_(packed, layout, vectors(2, 2, 130, 64), torch.arange(130))
        data.append(packed)
    mask = torch.arange(130) < torch.arange(q_len)[:, None] + 40
    mask = mask.expand(2, 1, q_len, 130).clone()
    mask[1, :, 0] = False  # a row that sees no key
    actual = calibrated.attention(
        query.to(device), *[x.to(device) for x in data], mask.to(device), None, 130, False, 0.2, 0.0, *names, 64
    ).cpu()
    expected = attend(query.float(), *data, *layouts, kv_len=130, scale=0.2, mask=mask)
    assert torch.equal(actual[1, :, 0], torch.zeros(4, 64, dtype=torch.bfloat16))
    assert (actual.float() - expected).norm() / expected.norm() < 1e-2


def test_attention_without_a_kernel_is_refused(device):
    name = based("transform_4321", num_heads=2, head_dim=64).name
    data = torch.zeros(PackedLayout(name, "key", 64).shape(64, 1, 2), dtype=torch.uint8, device=device)
    query = torch.zeros(1, 2, 1, 64, device=device)
    for sinks, softcap, reason in ((torch.zeros(2, device=device), 0.0, "attention sinks"), (None, 1.0, "a softcap")):
        with pytest.raises(ValueError, match=f"cannot have {reason} yet"):
            calibrated.attention(query, data, None, None, sinks, 64, False, 1.0, softcap, name, name, 64)


def test_attention_that_may_see_unwritten_tokens_is_refused():
    """Kernels decode a token that was never written as the mean, and the specification decodes it as zeros."""
    key, value = (
        PackedLayout(based("transform_4321", num_heads=2, head_dim=64).name, role, 64) for role in ("key", "value")
    )
    plain = PackedLayout("int8_per_token_head", "value", 64)
    for layouts in ((key, value), (key, plain)):
        reason = calibrated.refusal(*layouts, has_sinks=False, has_softcap=False, sees_unwritten=True)
        assert reason is not None
        assert "never written" in reason
        assert calibrated.refusal(*layouts, has_sinks=False, has_softcap=False) is None
    assert calibrated.refusal(plain, plain, has_sinks=False, has_softcap=False, sees_unwritten=True) is None


@pytest.mark.parametrize("tokens", [1, 20])
def test_words_may_have_exact_tokens(tokens, device):
    spec = "uniform_4321[recent=1,sinks=1,bfloat16]"
    layouts = PackedLayout.parse(spec, "key", 64), PackedLayout.parse(spec, "value", 64)
    data, query = [], vectors(1, 4, 1, 64).bfloat16()
    for layout in layouts:
        expected = torch.zeros(layout.shape(256, 1, 2), dtype=torch.uint8)
        write_tokens_(expected, layout, vectors(1, 2, 200, 64).bfloat16(), torch.arange(200))
        packed = expected.to(device, copy=True)
        x, positions = (
            vectors(1, 2, tokens, 64, seed=1).bfloat16(),
            torch.arange(30, 30 + tokens),
        )  # opens a block again
        write_tokens_(expected, layout, x, positions)
        launch.store(packed, x.to(device), positions.to(device), None, spec, layout.role)
        read = launch.dequantize(packed, 256, torch.float32, spec, layout.role, 64).cpu()
        torch.testing.assert_close(read, read_tokens(expected, layout, 256), rtol=1e-3, atol=1e-3)
        data.append((packed, expected))
    actual = launch.attention(
        query.to(device), data[0][0], data[1][0], None, None, 200, False, 0.2, 0.0, spec, spec, 64
    ).cpu()
    expected = attend(query.float(), data[0][1], data[1][1], *layouts, kv_len=200, scale=0.2)
    assert (actual.float() - expected).norm() / expected.norm() < 1e-2  # the interpreter truncates to bfloat16
