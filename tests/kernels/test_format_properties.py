"""Properties that hold for all vectors: zeros, outliers, subnormal numbers, infinities."""

from __future__ import annotations

import pytest
import torch
from formats_of_every_kind import BY_TOKEN
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_bytes import empty_packed
from torch import Tensor

from kvcompile.kernels.formats import FORMATS
from kvcompile.kernels.formats.base import BLOCK_TOKENS, Format
from kvcompile.kernels.formats.fp8 import Fp8
from kvcompile.kernels.formats.half import SATURATION
from kvcompile.kernels.formats.rotation import rotate
from kvcompile.kernels.formats.turboquant import HALF_MAX
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.kernels.spec.packing import read_tokens, write_tokens_

HEAD_DIM, BATCH, HEADS, TOKENS = 64, 2, 2, 130
HARD = {
    "zeros": lambda x: 0.0 * x,
    "one huge channel": lambda x: torch.where(torch.arange(HEAD_DIM) == 5, 3e4, x),
    "subnormal": lambda x: x * 1e-39,
    "tiny": lambda x: x * 1e-9,
    "far from zero": lambda x: x + 1e3,
    "constant": lambda x: 0.0 * x - 1.7,
    "large": lambda x: x * 1e3,
    "immense": lambda x: x * 1e30,
}
"""Functions that turn random vectors into vectors that are hard to quantize."""

LAYOUTS = [
    *(PackedLayout(name, "value", HEAD_DIM) for name in BY_TOKEN),
    *(PackedLayout(name, "key", HEAD_DIM, Residual(0, 1, torch.float32)) for name in FORMATS if "channel" in name),
    PackedLayout("turboquant_3bit", "value", HEAD_DIM, Residual(1, 1, torch.float32)),
    PackedLayout("fp8_e4m3_scale0.03", "key", HEAD_DIM, Residual(1, 0, torch.float32)),
]
few_examples = settings(max_examples=4, deadline=None, derandomize=True)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.spec)


@st.composite
def vectors(draw: st.DrawFn, *shape: int) -> Tensor:
    """Random vectors [*shape, HEAD_DIM], about half of them hard."""
    x = torch.randn(*shape, HEAD_DIM, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    flat = x.view(-1, HEAD_DIM)
    kinds = draw(st.lists(st.sampled_from([*HARD, None]), min_size=5, max_size=20))
    for i, kind in enumerate(kinds * (len(flat) // (2 * len(kinds)))):
        if kind is not None:
            flat[2 * i] = HARD[kind](flat[2 * i])
    return x


def largest_error(fmt: Format, x: Tensor, encoded: dict[str, Tensor]) -> Tensor:
    """The largest error of the stored channels of ``x``, vectors in the stored basis."""
    scale = fmt.per_channel(encoded["scale"], x.shape[-1]) if "scale" in encoded else torch.tensor(fmt.static_scale)
    if isinstance(fmt, Fp8):
        info = torch.finfo(fmt.dtype)
        return torch.maximum(x.abs() * info.eps / 2, scale * info.smallest_normal * info.eps / 2)
    if fmt.packing.dtype != torch.uint8:
        info = torch.finfo(fmt.packing.dtype)
        return torch.maximum(x.abs() * info.eps / 2, torch.tensor(info.smallest_normal * info.eps / 2))
    return scale / 2  # half a step of the grid


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if "turboquant" not in fmt.name and
                                 not fmt.unsupported(HEAD_DIM, "key")], ids=lambda fmt: fmt.name)  # fmt: skip
@given(x=vectors(1, BLOCK_TOKENS))
@few_examples
def test_every_channel_is_rounded_to_a_neighbour_on_the_grid_or_saturates(fmt: Format, x: Tensor) -> None:
    encoded = fmt.encode(x)
    stored, decoded = rotate(x, fmt.rotation_seed) if fmt.rotated else x, fmt.decode_levels(encoded)
    if torch.float16 in (fmt.scale_dtype, fmt.packing.dtype):
        bound = SATURATION if fmt.scale_dtype is not None else torch.inf
        stored = stored.clamp(-bound, bound)
    elif isinstance(fmt, Fp8) and fmt.scale_dtype is None:
        stored = stored.clamp(-fmt.largest * fmt.static_scale, fmt.largest * fmt.static_scale)
    overflows = fmt.packing.dtype == torch.float16 and stored.abs() > HALF_MAX
    smallest = 2**-24 if fmt.scale_dtype == torch.float16 else 1e-44  # of scales, zero points and their rounding
    zero = fmt.per_channel(encoded["zero"], x.shape[-1]).abs() if "zero" in encoded else 0.0
    rounding = (stored.abs() + zero) * 2**-21 + smallest
    close = (decoded - stored).abs() <= largest_error(fmt, stored, encoded) * (1 + 2**-12) + rounding
    assert (close | overflows).all()


@pytest.mark.parametrize("name", [name for name in FORMATS if "turboquant" in name])
@given(x=vectors(BLOCK_TOKENS))
@few_examples
def test_a_codebook_keeps_the_norm_or_saturates(name: str, x: Tensor) -> None:
    fmt, rms = FORMATS[name], x.double().square().mean(-1).sqrt()
    decoded = fmt.decode(fmt.encode(x)).double().square().mean(-1).sqrt()
    assert (decoded[rms > 2 * HALF_MAX] <= 2 * HALF_MAX).all()
    normal = (rms > 1e-4) & (rms < 1e4)
    torch.testing.assert_close(decoded[normal], rms[normal], rtol=2**-10, atol=0)
    assert ((decoded - rms)[rms <= 1e-4].abs() <= 1e-7).all()


def written(layout: PackedLayout, x: Tensor, steps: list[Tensor]) -> Tensor:
    """The tokens that are read after all steps were written."""
    data = empty_packed(layout, TOKENS, *x.shape[:2], torch.device("cpu"))
    for positions in steps:
        write_tokens_(data, layout, x[:, :, positions], positions)
    return read_tokens(data, layout, TOKENS)


@every_layout
@given(x=vectors(BATCH, HEADS, TOKENS), data=st.data())
@few_examples
def test_values_that_are_not_finite_spoil_no_other_token_sequence_or_head(
    layout: PackedLayout, x: Tensor, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, TOKENS), max_size=2)))
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    steps = list(torch.tensor_split(order, cuts))
    bad = torch.rand(BATCH, HEADS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.1
    value = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    channel = data.draw(st.integers(0, HEAD_DIM - 1))
    spoiled, zeroed = x.clone(), x.masked_fill(bad[..., None], 0.0)
    spoiled[..., channel] = torch.where(bad, value, x[..., channel])
    out, expected = written(layout, spoiled, steps), written(layout, zeroed, steps)
    assert torch.equal(out[~bad], expected[~bad])

    kept = (
        out[bad][:, channel] == value if value == value else out[bad][:, channel].isnan()
    )  # in an exact block, or unchanged
    marked = out[bad].isnan().all(-1)
    zeros = (out[bad] == expected[bad]).all(-1)
    marks = layout.format.scale_dtype is not None and layout.format.granularity != "channel"
    is_plain = layout.format.packing.dtype != torch.uint8
    assert (kept | (marked if marks else zeros)).all()
    if layout.residual is None:
        assert (kept if is_plain else marked if marks else zeros).all()


@every_layout
@given(x=vectors(BATCH, HEADS, TOKENS), seed=st.integers(0, 99))
@few_examples
def test_sequences_and_heads_know_nothing_of_each_other(layout: PackedLayout, x: Tensor, seed: int) -> None:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(seed))
    steps = list(torch.tensor_split(order, [9, 40]))
    whole = written(layout, x, steps)
    assert torch.equal(written(layout, x.flip(0), steps), whole.flip(0))
    assert torch.equal(written(layout, x.flip(1), steps), whole.flip(1))
    assert torch.equal(written(layout, x[1:, :1], steps), whole[1:, :1])
