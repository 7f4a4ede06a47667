"""The store kernel writes the same bytes as the specification."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from formats_of_every_kind import BY_TOKEN, SHAPES, in_turn
from packed_bytes import empty_packed
from stored_bytes import assert_same_sections, assert_stores_like_the_specification, random_bytes, vectors

from kvcompile.kernels import launch
from kvcompile.kernels.lang.triton import INTERPRETED
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.packing import write_tokens_
from kvcompile.kernels.tiles import runs

CPU = torch.device("cpu")

ROLES = ["key", "value"]
both_roles = pytest.mark.parametrize("role", ROLES)


@pytest.mark.parametrize(("shape", "role"), in_turn([*SHAPES, ("turboquant_2.5bit", 16)], ROLES))
def test_stored_bytes_equal_the_specification(shape, role, device):
    format_name, head_dim = shape
    layout, tokens = PackedLayout(format_name, role, head_dim), {64: 65, 80: 1, 128: 63}.get(head_dim, 3)
    x = vectors(1, 2, tokens, head_dim)
    positions = torch.arange(60, 60 + tokens)
    assert_stores_like_the_specification(layout, x, positions, device=device, capacity=130)


PADDED = [
    *[(f"turboquant_{bits}", 96) for bits in ("2.5bit", "3bit", "3.5bit_seed7", "4bit")],
    *[("turboquant_3bit", head_dim) for head_dim in (80, 112, 192, 256)],
    *[("int4_per_token_head", 192), ("int2_per_token_head", 144), ("int4_unrotated", 96), ("int3_unrotated", 48)],
    *[("int2_per_group_32", 96), ("uniform_531", 48), ("uniform_42", 80), ("uniform_4321", 96)],
    ("int3_unrotated", 32),
]
"""Formats and head_dims whose planes, or pieces of planes, have padding in a tile, and two without padding."""


@pytest.mark.parametrize(("shape", "role"), in_turn(PADDED, ROLES))
def test_a_block_and_a_part_of_a_block_are_stored_for_any_width_of_planes(shape, role, device):
    format_name, head_dim = shape
    layout = PackedLayout(format_name, role, head_dim)
    assert_stores_like_the_specification(
        layout, vectors(1, 1, 67, head_dim), torch.arange(67), device=device, capacity=130
    )


@pytest.mark.skipif(not INTERPRETED, reason="the number of groups follows from the GPU")
@pytest.mark.parametrize(("head_dim", "groups"), [(16, 4), (64, 4), (96, 4), (192, 8), (256, 8)])
def test_a_rotation_in_groups_of_rows_stores_the_same(head_dim, groups, monkeypatch):
    monkeypatch.setattr(runs, "groups_of_rows", lambda operand: groups)
    layout = PackedLayout("turboquant_3bit", "key", head_dim)
    x = vectors(1, 1, 67, head_dim)
    assert_stores_like_the_specification(layout, x, torch.arange(67), device=CPU, capacity=130)


@both_roles
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_any_number_of_tokens_may_cross_any_number_of_blocks(role, tokens, device):
    layout = PackedLayout("int8_per_token_head", role, 64)
    for start in (0, 63):
        x, positions = vectors(1, 2, tokens, 64), torch.arange(start, start + tokens)
        assert_stores_like_the_specification(layout, x, positions, device=device, capacity=200)


@pytest.mark.parametrize(("format_name", "role"), in_turn(BY_TOKEN, ROLES[::-1]))
def test_tokens_are_stored_at_the_positions_of_each_sequence_and_invalid_ones_are_not_stored(format_name, role, device):
    generator = torch.Generator().manual_seed(2)
    positions = torch.stack([torch.randperm(150, generator=generator)[:40] for _ in range(2)])
    valid = torch.rand(2, 40, generator=generator) > 0.3
    layout = PackedLayout(format_name, role, 64)
    assert_stores_like_the_specification(layout, vectors(2, 2, 40, 64), positions, valid, device=device, capacity=150)


def test_one_valid_mask_may_serve_all_sequences(device):
    layout = PackedLayout("int8_per_token_head", "key", 64)
    valid = torch.arange(9) % 2 == 0
    positions = torch.arange(9)
    assert_stores_like_the_specification(layout, vectors(2, 2, 9, 64), positions, valid, device=device, capacity=70)


@pytest.mark.parametrize(
    "format_name", ["turboquant_4bit", pytest.param("int8_per_token_head", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "restride",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # [batch, tokens, heads, head_dim] in memory
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),  # channels far apart
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],  # part of a fused projection
        lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),  # one head for all
    ],
)
def test_vectors_may_have_any_strides(format_name, restride, device):
    layout = PackedLayout(format_name, "value", 64)
    x, positions = vectors(2, 3, 5, 64), torch.arange(5)
    assert_stores_like_the_specification(layout, x, positions, device=device, capacity=64, restride=restride)


def vectors_next_to_ties(fmt, tokens, head_dim):
    """float32 vectors whose channels lie half way between two levels, up to two units in the last place."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 2, tokens, head_dim, generator=generator)
    x[..., 0], x[..., 1] = (
        4 + x[..., 0].abs(),
        -4 - x[..., 1].abs(),
    )  # the only channels on which scales and zero points depend
    if fmt.scale_dtype == torch.float32:
        x *= 10.0 ** torch.randint(-42, 36, (tokens, 1), generator=generator)
    encoded = fmt.encode(x)
    levels = fmt.levels(torch.arange(2 ** int(fmt.bits), dtype=torch.uint8)).unique()
    levels = levels[levels.abs() < 100]
    ties = (levels[1:] + levels[:-1]) / 2
    between = ties[torch.randint(0, len(ties), x.shape, generator=generator)] * encoded["scale"] + encoded.get(
        "zero", 0
    )
    off = torch.randint(-2, 3, x.shape, generator=generator, dtype=torch.int32)
    between = torch.where(between.abs() < 1e-43, between, (between.view(torch.int32) + off).view(torch.float32))
    x[..., 2:] = between.clamp(x[..., 1:2], x[..., :1])[..., 2:]
    x[..., 2] = -0.0
    return x


@pytest.mark.parametrize("format_name", ["int8_per_token_head", "fp8_e4m3", "fp8_e5m2", "int4_unrotated"])
def test_channels_next_to_ties_are_rounded_as_by_a_division(format_name, device):
    layout = PackedLayout(format_name, "key", 128)
    x = vectors_next_to_ties(layout.format, 150, 128)
    assert_stores_like_the_specification(layout, x, torch.arange(150), device=device, capacity=150)


@pytest.mark.parametrize(("format_name", "dtype"), in_turn(BY_TOKEN, [torch.float16, torch.float32]))
def test_vectors_may_have_any_float_dtype(format_name, dtype, device):
    layout = PackedLayout(format_name, "key", 64)
    x = vectors(1, 2, 20, 64, dtype)
    assert_stores_like_the_specification(layout, x, torch.arange(20), device=device, capacity=64)


@pytest.mark.parametrize(("format_name", "bad"), in_turn(BY_TOKEN, [float("nan"), float("inf"), float("-inf")]))
def test_a_vector_that_is_not_finite_becomes_nan_and_touches_no_other(format_name, bad, device):
    layout = PackedLayout(format_name, "key", 64)
    x = vectors(1, 2, 12, 64)
    x[0, 1, 5, 17] = bad
    assert_stores_like_the_specification(layout, x, torch.arange(12), device=device, capacity=64)


@both_roles
def test_data_may_be_part_of_a_larger_buffer(role, device):
    layout = PackedLayout("int4_per_token_head", role, 64)
    buffer = random_bytes(layout, 300, 4, 2)
    x, positions = vectors(2, 2, 70, 64), torch.arange(30, 100)
    expected = buffer.clone()
    write_tokens_(expected[:2, 1:3], layout, x, positions)
    on_device = buffer.to(device)
    launch.store(on_device[:2, 1:3], x.to(device), positions.to(device), None, layout.format_name, role)
    different = (on_device.cpu() != expected).sum()
    assert different <= 4  # ties in the rotation may round differently; no byte outside the part changes


def positions_in_any_order(count, num_tokens, seed):
    return torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))[:count]


# Writes to a cache of 200 tokens: blocks are filled, left, re-opened, rolled back and overwritten.
WRITES = {
    "token by token": [torch.tensor([i]) for i in (0, 63, 64, 1, 130)],
    "few tokens over several blocks": [
        torch.arange(60, 67), torch.arange(56, 66), torch.tensor([199, 3, 64, 130]), torch.arange(120, 136),
    ],
    "a prompt, a rollback, and tokens again": [
        torch.arange(150), torch.arange(150, 151), torch.arange(70, 71), torch.arange(71, 140), torch.arange(128, 192),
    ],
    "any order": [positions_in_any_order(count, 200, seed=count) for count in (40, 9, 90)],
}  # fmt: skip

RESIDUALS = [
    ("int4_per_channel[recent=1,sinks=0,{}]", "key"),
    ("int8_per_channel[recent=2,sinks=1,{}]", "key"),
    ("int4_unrotated[recent=1,sinks=1,{}]", "value"),
    ("int4_per_token_head[recent=1,sinks=0,{}]", "value"),
    ("fp8_e4m3[recent=0,sinks=1,{}]", "value"),
    ("turboquant_3.5bit[recent=1,sinks=0,{}]", "value"),
]


def assert_writes_like_the_specification(layout, writes, device, batch=1, seed=0):
    """Write to a cache of zeros, and compare it, header included, after each of the writes (positions, valid)."""
    dtype = layout.residual.dtype
    heads = batch  # one, or two of two sequences
    expected = empty_packed(layout, 200, batch, heads, CPU)
    data = expected.to(device, copy=True)
    for step, (positions, valid) in enumerate(writes):
        x = vectors(batch, heads, positions.shape[-1], layout.head_dim, dtype, seed + step)
        write_tokens_(expected, layout, x, positions, valid)
        valid = None if valid is None else valid.to(device)
        launch.store(data, x.to(device), positions.to(device), valid, layout.spec, layout.role)
        written = data.cpu()
        assert_same_sections(layout, written, expected, device)
        assert torch.equal(layout.tags(written), layout.tags(expected))
        rows, expected_rows = layout.rows(written).float(), layout.rows(expected).float()
        if layout.format.rotated:  # re-opened blocks may be rounded differently, see above
            assert (rows - expected_rows).norm() <= 2e-3 * expected_rows.norm()
        else:
            torch.testing.assert_close(rows, expected_rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("spec", "role", "writes"),
    [(*RESIDUALS[0], writes) for writes in WRITES]
    + [
        pytest.param(*residual, writes, marks=() if index % 2 == at else pytest.mark.slow)
        for index, residual in enumerate(RESIDUALS[1:])
        for at, writes in enumerate(("few tokens over several blocks", "any order"))
    ],
)
def test_packed_and_exact_blocks_are_written_as_the_specification_does(spec, role, writes, device):
    # Triton's interpreter does not round to the nearest bfloat16.
    dtype = "float16" if device.type == "cpu" else "bfloat16"
    layout = PackedLayout.parse(spec.format(dtype), role, 64)
    assert_writes_like_the_specification(layout, [(positions, None) for positions in WRITES[writes]], device)


@pytest.mark.parametrize(("spec", "role"), [RESIDUALS[2], pytest.param(*RESIDUALS[1], marks=pytest.mark.slow)])
def test_with_a_residual_each_sequence_has_its_own_positions_and_invalid_tokens_are_not_written(spec, role, device):
    layout = PackedLayout.parse(spec.format("float32"), role, 48)
    writes = []
    for count in (90, 5, 1):
        positions = torch.stack([positions_in_any_order(count, 200, seed) for seed in (count, count + 1)])
        valid = torch.rand(2, count, generator=torch.Generator().manual_seed(count)) > 0.4
        writes.append((positions.T.contiguous().T, valid))
    writes.append((writes[0][0], torch.zeros(2, 90, dtype=torch.bool)))
    assert_writes_like_the_specification(layout, writes, device, batch=2)


@pytest.mark.parametrize("tokens", [5, 70])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_exact_token_that_is_not_finite_stays_so_and_spoils_no_scale(bad, tokens, device):
    layout = PackedLayout.parse("int4_per_channel[recent=1,sinks=0,float16]", "key", 64)
    expected = empty_packed(layout, 128, 1, 2, CPU)
    data = expected.to(device, copy=True)
    x = vectors(1, 2, tokens, 64, torch.float16)
    x[0, 1, 4, 17] = bad
    write_tokens_(expected, layout, x, torch.arange(tokens))
    launch.store(data, x.to(device), torch.arange(tokens, device=device), None, layout.spec, "key")
    assert_same_sections(layout, data.cpu(), expected, device)
    assert torch.equal(layout.rows(data.cpu()).isnan(), layout.rows(expected).isnan())


@pytest.mark.parametrize(
    ("spec", "head_dim"),
    [
        ("int4_per_channel[recent=1,sinks=0,float32]", 128),
        ("int4_per_channel[recent=2,sinks=1,float16]", 80),
        ("int8_per_channel[recent=1,sinks=0,float32]", 16),
        ("int8_per_channel[recent=0,sinks=1,float16]", 48),
        ("int2_per_channel[recent=1,sinks=1,float16]", 128),
        ("int2_per_channel[recent=2,sinks=0,float32]", 80),
    ],
)
def test_a_token_changes_the_codes_of_its_block(spec, head_dim, device):
    """A step into a held block, the last row of a block, a new block, an invalid token, and a block that was left."""
    layout = PackedLayout.parse(spec, "key", head_dim)
    writes = [(torch.arange(60), None)]
    writes += [(torch.tensor([position]), None) for position in (60, 63, 64, 65, 64, 7)]
    writes += [(torch.tensor([66]), torch.tensor([[valid]])) for valid in (False, True)]
    assert_writes_like_the_specification(layout, writes, device)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format_name", ["int8_per_channel", "int4_per_channel"])
def test_a_token_beside_a_token_that_is_not_finite_is_written_as_the_specification_does(format_name, bad, device):
    layout = PackedLayout.parse(f"{format_name}[recent=1,sinks=0,float16]", "key", 64)
    expected = empty_packed(layout, 128, 1, 2, CPU)
    data = expected.to(device, copy=True)
    for position in range(5):  # the second token is not finite, and then it is in the entry
        x = vectors(1, 2, 1, 64, torch.float16, position)
        x[0, 1, 0, 17] = bad if position == 1 else 1.0
        write_tokens_(expected, layout, x, torch.tensor([position]))
        launch.store(data, x.to(device), torch.tensor([position], device=device), None, layout.spec, "key")
        assert_same_sections(layout, data.cpu(), expected, device)
        torch.testing.assert_close(layout.rows(data.cpu()), layout.rows(expected), rtol=0, atol=0, equal_nan=True)


def test_a_cache_with_a_residual_may_be_part_of_a_larger_buffer(device):
    layout = PackedLayout.parse("int4_per_channel[recent=1,sinks=1,float16]", "key", 64)
    buffer = random_bytes(layout, 300, 4, 2)
    expected, on_device = buffer.clone(), buffer.to(device)
    part = slice(0, layout.blocks(130)), slice(1, 3)
    for tokens in (20, 5):
        x = vectors(2, 2, tokens, 64, torch.float16)
        positions = torch.arange(129 - tokens, 129)
        write_tokens_(expected[part], layout, x, positions)
        launch.store(on_device[part], x.to(device), positions.to(device), None, layout.spec, "key")
    assert_same_sections(layout, on_device[part].cpu(), expected[part], device)
    on_device[part], expected[part] = 0, 0
    assert torch.equal(on_device.cpu(), expected)


def test_tokens_that_share_scales_need_a_residual(device):
    layout = PackedLayout("int4_per_channel", "key", 64)
    data = empty_packed(layout, 64, 1, 1, device)
    with pytest.raises(ValueError, match="written through a residual"):
        launch.store(data, torch.zeros(1, 1, 1, 64), torch.zeros(1, dtype=torch.int64), None, layout.spec, "key")


def store_outside_the_cache(device, position, spec, tokens):
    """Store tokens, the last one at ``position``, to a cache of 192 tokens between two others.

    Returns whether all bytes of the others are unchanged.
    """
    layout = PackedLayout.parse(spec, "key", 64)
    inside = slice(1, 1 + layout.blocks(192))
    buffer = random_bytes(layout, 64 * (inside.stop + 1), 1, 1).to(device)
    before = buffer.clone()
    positions = torch.arange(tokens, device=device)
    positions[-1] = position
    launch.store(buffer[inside], vectors(1, 1, tokens, 64).to(device), positions, None, layout.spec, "key")
    buffer[inside], before[inside] = 0, 0
    return torch.equal(buffer, before)


outside = pytest.mark.parametrize("position", [-1, 192, 2**40])
every_store = pytest.mark.parametrize(
    ("spec", "tokens"),
    [("int8_per_token_head", 1), ("int4_per_channel[recent=1,sinks=0,bfloat16]", 2),
     ("int4_per_channel[recent=1,sinks=0,bfloat16]", 20)],
)  # fmt: skip


@outside
@every_store
def test_a_position_outside_the_cache_reaches_no_memory(spec, tokens, position, device):
    if device.type == "cuda":
        pytest.skip("an assertion fails there, and takes the process's CUDA context along")
    assert store_outside_the_cache(device, position, spec, tokens)


@outside
@every_store
@pytest.mark.gpu
def test_a_position_outside_the_cache_fails_an_assertion_on_a_gpu(spec, tokens, position):
    arguments = f"t.torch.device('cuda'), {position}, {spec!r}, {tokens}"
    program = f"import test_store_kernel as t; t.store_outside_the_cache({arguments})"
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "a position is outside of the cache" in done.stderr + done.stdout
    assert "device-side assert" in done.stderr


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(("key", "value"), [("turboquant_4bit", "int4_unrotated"), ("int8_per_token_head", "fp8_e4m3")])
def test_a_pair_of_stores_writes_the_bytes_of_two_stores(key, value, tokens, device):
    layouts = PackedLayout(key, "key", 64), PackedLayout(value, "value", 80)
    x = [torch.randn(2, 2, tokens, layout.head_dim).to(device) for layout in layouts]
    positions = torch.stack([torch.randperm(100)[:tokens] for _ in range(2)]).to(device)
    valid = (torch.arange(2 * tokens).view(2, tokens) % 5 != 1).to(device)
    data, expected = ([random_bytes(layout, 100, 2, 2).to(device) for layout in layouts] for _ in range(2))
    launch.store_pair(*data, *x, positions, valid, key, value)
    for expected_data, new, layout in zip(expected, x, layouts, strict=True):
        launch.store(expected_data, new, positions, valid, layout.format_name, layout.role)
    assert all(torch.equal(*pair) for pair in zip(data, expected, strict=True))


def test_storing_nothing_is_allowed(device):
    layout = PackedLayout("int8_per_token_head", "key", 64)
    data = empty_packed(layout, 64, 1, 1, device)
    positions = torch.zeros(0, dtype=torch.int64, device=device)
    launch.store(data, torch.zeros(1, 1, 0, 64, device=device), positions, None, layout.format_name, "key")
    assert data.eq(0).all()


@pytest.mark.gpu
def test_offsets_beyond_two_gigabytes_are_right():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    layout = PackedLayout("int8_per_token_head", "value", 128)
    data = empty_packed(layout, 300_000, 8, 8, torch.device("cuda"))
    assert data.numel() > 2**31
    x = vectors(8, 8, 1, 128)
    launch.store(data, x.cuda(), torch.tensor([299_999], device="cuda"), None, layout.format_name, "value")
    expected = empty_packed(layout, 64, 8, 8, CPU)
    write_tokens_(expected, layout, x, torch.tensor([299_999 % 64]))
    assert torch.equal(data[-1].cpu(), expected[0])
    assert not data[:-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 20])
def test_offsets_beyond_two_gigabytes_are_right_with_a_residual(tokens):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    layout = PackedLayout.parse("int4_per_channel[recent=1,sinks=0,bfloat16]", "key", 128)
    data = empty_packed(layout, 300_000, 8, 16, torch.device("cuda"))
    assert data.numel() > 2**31
    x, positions = vectors(8, 16, tokens, 128), torch.arange(300_000 - tokens, 300_000)
    launch.store(data, x.cuda(), positions.cuda(), None, layout.spec, "key")
    expected = empty_packed(layout, 64, 8, 16, CPU)
    write_tokens_(expected, layout, x, positions % 64)
    assert torch.equal(data[-1].cpu(), expected[-1])
    assert torch.equal(layout.rows(data).cpu(), layout.rows(expected))
    assert layout.tags(data).eq(layout.token_blocks(data)).all()
    assert not data[layout.header_blocks : -1].any()
