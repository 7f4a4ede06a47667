"""Decode attention on packed latents, compared with the read ceiling and with PyTorch on the same latents in bfloat16.

    python benchmarks/latents.py [--shapes 8,128/1,512,32768 ...] [--q-len 1]

For every shape, this measures the time of ``kvcompile::attention`` on a full cache of random latents in ``fp8_ds_mla``,
which serve as keys and values. The baseline is the fastest of two kinds: the backends of
``scaled_dot_product_attention`` that take 512 channels, and two matrix products with a softmax between them. Bytes
count a single read of the latents. With many heads the tensor cores are the limit; the note of a row gives operations
per second. Every result is first compared with the plain-PyTorch specification.
"""

from __future__ import annotations

import argparse

import torch
from recording import Chart, Recorder, argument, parse_arguments
from torch import Tensor

from kvcompile.benching.measuring import Timing, num_sets, time_graph
from kvcompile.benching.workloads import DEVICE, DTYPE, Shape, check, decode_sdpa_calls, relative_error, time_sdpa
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.packing import pack_tokens

LAYOUT = PackedLayout("fp8_ds_mla", "key", 512)
SHAPES = [Shape.parse(text) for text in ("8,128/1,512,32768", "8,16/1,512,32768", "1,128/1,512,131072")]


def attention(query: Tensor, data: Tensor, context: int) -> Tensor:
    """The attention that is timed; nothing else here calls the operator."""
    name, scale = LAYOUT.format_name, LAYOUT.head_dim**-0.5
    return torch.ops.kvcompile.attention(
        query, data, None, None, None, context, False, scale, 0.0, name, name, LAYOUT.head_dim
    )


def check_attention(query: Tensor, data: Tensor, context: int) -> float:
    """Relative error of the attention compared with the specification, in the first and the last sequence.

    Raises:
        ArithmeticError: the error is too large.
    """
    out, errors = attention(query, data, context), []
    for sequence in (slice(0, 1), slice(-1, None)):
        part = data[:, sequence]
        expected = attend(query[sequence].float(), part, part, LAYOUT, LAYOUT, kv_len=context)
        errors.append(relative_error(out[sequence], expected))
    return check(max(errors), f"attention on {LAYOUT.format_name}")


def products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as two matrix products and a softmax, for all query heads of a KV head at once."""
    rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    weights = torch.softmax(rows @ key.transpose(2, 3) * query.shape[3] ** -0.5, -1)
    return (weights @ value).reshape(query.shape)


def random_latents(shape: Shape) -> Tensor:
    return torch.randn(shape.batch, shape.num_kv_heads, shape.context, shape.head_dim, dtype=DTYPE, device=DEVICE)


def random_data(shape: Shape) -> Tensor:
    """Packed random latents, encoded in chunks so that temporaries stay small."""
    chunks = random_latents(shape).split(64 * BLOCK_TOKENS, 2)
    return torch.cat([pack_tokens(LAYOUT, chunk) for chunk in chunks])


def time_baseline(recorder: Recorder, shape: Shape, q_len: int) -> tuple[str, Timing] | None:
    """Add a row for PyTorch's fastest attention, with all times in its note. Returns its name and time."""
    nbytes, timings = shape.plain_bytes // 2, {}
    with recorder.row(case="PyTorch", shape=str(shape), format="plain", q_len=q_len) as row:
        latents = [random_latents(shape) for _ in range(num_sets(nbytes))]
        inputs = [(shape.query(q_len), latent, latent) for latent in latents]
        timings = time_sdpa({**decode_sdpa_calls(), "matrix products": products}, inputs)
        row |= recorder.timed(next(iter(timings.values())), nbytes)
        row["note"] = "; ".join(f"{name} {timing.microseconds:.1f} us" for name, timing in timings.items())
    return next(iter(timings.items()), None)


def time_latents(recorder: Recorder, shape: Shape, q_len: int, baseline: tuple[str, Timing] | None) -> None:
    """Add a row for a full cache."""
    with recorder.row(case="kvcompile", shape=str(shape), format=LAYOUT.format_name, q_len=q_len) as row:
        nbytes = shape.batch * shape.num_kv_heads * shape.context * LAYOUT.bytes_per_token
        inputs = [(shape.query(q_len), random_data(shape), shape.context) for _ in range(num_sets(nbytes))]
        row["relative_error"] = check_attention(*inputs[0])
        timing = time_graph(attention, inputs)
        row |= recorder.timed(timing, nbytes, baseline)
        operations = 4 * shape.batch * shape.num_heads * q_len * shape.context * shape.head_dim
        row["note"] = f"{operations / timing.seconds / 1e12:.0f} TFLOP/s"


def parse_shape(text: str) -> Shape:
    shape = Shape.parse(text)
    if shape.head_dim != LAYOUT.head_dim:
        raise argparse.ArgumentTypeError(f"{text!r} has head_dim {shape.head_dim}; latents have {LAYOUT.head_dim}")
    return shape


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", type=argument(parse_shape), default=SHAPES)
    parser.add_argument("--q-len", type=int, default=1, help="query positions (default: %(default)s)")
    arguments = parse_arguments(parser)
    recorder = Recorder(arguments, Chart("shape", ("case", "format"), ("of_read_ceiling", "speedup")))
    with torch.no_grad():
        for shape in arguments.shapes:
            baseline = time_baseline(recorder, shape, arguments.q_len)
            time_latents(recorder, shape, arguments.q_len, baseline)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
