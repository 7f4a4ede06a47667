"""Prefill attention through a packed cache, as compiled graphs run it, compared with PyTorch's attention in bfloat16.

    python benchmarks/prefill.py [--shape 1,32/8,128,32768] [--prompt 8192] [--chunk 512] [--formats ...]

One attention layer under ``torch.compile(backend="kvquant")`` stores K and V and attends. A *fresh prefill* of
``--prompt`` tokens fills a Hugging Face cache that is made in the graph, growing or static. A *continued chunk* of
``--chunk`` tokens extends a static cache that holds the context of ``--shape``. The baseline is the fastest backend of
``scaled_dot_product_attention`` alone, on plain tensors of the same lengths. Results are first compared with the flash
backend on dequantized earlier tokens and exact new tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from recording import Chart, Recorder, argument, parse_arguments
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from kvcompile.benching.measuring import Timing, num_sets, time_graph
from kvcompile.benching.workloads import (
    DEVICE,
    DTYPE,
    SDPA_BACKENDS,
    Caches,
    Shape,
    check,
    fully_packed_formats,
    parse_fully_packed,
    relative_error,
    sdpa,
    time_sdpa,
)
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.site import FormatPair

Result = tuple[Tensor, Tensor, Tensor]
"""The output, and the keys and values of the cache."""


def prefill_growing(query: Tensor, key: Tensor, value: Tensor, one: Tensor) -> Result:
    """``one`` is 1. The product with ``one`` makes K and V computed values, as in a model, instead of graph inputs."""
    cache = DynamicLayer()
    key, value = cache.update(key * one, value * one)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True), cache.keys, cache.values


def prefill_static(query: Tensor, key: Tensor, value: Tensor, one: Tensor, mask: Tensor) -> Result:
    cache = StaticLayer(mask.shape[-1])
    key, value = cache.update(key * one, value * one)
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True), cache.keys, cache.values


def continue_static(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, mask: Tensor
) -> Result:
    k_cache.index_copy_(2, positions, key)
    v_cache.index_copy_(2, positions, value)
    return F.scaled_dot_product_attention(query, k_cache, v_cache, mask, enable_gqa=True), k_cache, v_cache


def causal_mask(q_len: int, kv_len: int, capacity: int) -> Tensor:
    """The mask of the last ``q_len`` of ``kv_len`` tokens in a static cache, bool [1, 1, q_len, capacity]."""
    last_visible = torch.arange(kv_len - q_len, kv_len, device=DEVICE)
    return (torch.arange(capacity, device=DEVICE) <= last_visible[:, None])[None, None]


def time_baseline(recorder: Recorder, case: str, shape: Shape, q_len: int) -> tuple[str, Timing] | None:
    """Add a row for the fastest backend, with ``q_len`` queries at the end of the context; its note has all times.

    Returns its name and time.
    """
    timings: dict[str, Timing] = {}
    with recorder.row(case=case, shape=str(shape), format="plain", q_len=q_len) as row:
        inputs = [(shape.query(q_len), *shape.key_and_value()) for _ in range(num_sets(shape.plain_bytes))]
        calls = {name: functools.partial(sdpa, name, is_causal=True) for name in SDPA_BACKENDS}
        timings = time_sdpa(calls, inputs)
        row |= recorder.timed(next(iter(timings.values())))
        row["note"] = "; ".join(f"{name} {timing.microseconds:.0f} us" for name, timing in timings.items())
    return next(iter(timings.items()), None)


def time_layer(
    recorder: Recorder,
    case: str,
    shape: Shape,
    name: str,
    layer: Callable[..., Result],
    make_inputs: Callable[[], Sequence[tuple[Tensor, ...]]],
    baseline: tuple[str, Timing] | None,
) -> None:
    """Add a row for a compiled attention layer, whose first inputs are query, key and value of the new tokens."""
    with recorder.row(case=case, shape=str(shape), format=name) as row:
        inputs = make_inputs()
        row["q_len"] = inputs[0][0].shape[2]
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="kvquant", options={"policy": name, "on_unsupported": "error"})
        row["relative_error"] = check_layer(compiled, inputs[0], shape.context)
        row |= recorder.timed(time_graph(compiled, inputs), baseline=baseline)


def check_layer(compiled: Callable[..., Result], inputs: tuple[Tensor, ...], kv_len: int) -> float:
    """Relative error compared with attention on the dequantized cache with exact new tokens.

    Raises:
        ArithmeticError: the error is too large.
        TypeError: the cache is not packed.
    """
    query, *newest = inputs[:3]
    out, *caches = compiled(*inputs)
    for cache in caches:
        if not isinstance(cache, PackedTensor):
            raise TypeError(f"the cache is a {type(cache).__name__}: the graph was not rewritten")
    packed = [cache.dequantize()[:, :, :kv_len] for cache in caches]
    exact = [torch.cat([past[:, :, : -new.shape[2]], new], 2) for past, new in zip(packed, newest, strict=True)]
    return check(relative_error(out, sdpa("flash", query, *exact, is_causal=True)), "the compiled layer", 2e-2)


def prefill_inputs(shape: Shape, *more: Tensor) -> list[tuple[Tensor, ...]]:
    """Inputs of a fresh prefill of ``shape.context`` tokens."""
    one = torch.ones((), dtype=DTYPE, device=DEVICE)
    return [(shape.query(shape.context), *shape.key_and_value(), one, *more) for _ in range(2)]


def chunk_inputs(shape: Shape, chunk: int, pair: FormatPair) -> list[tuple[Tensor, ...]]:
    """Inputs of the last ``chunk`` of ``shape.context`` tokens, on caches full of random tokens."""
    caches = Caches(shape, pair)
    size = (shape.batch, shape.num_kv_heads, shape.context, shape.head_dim)
    positions = torch.arange(shape.context - chunk, shape.context, device=DEVICE)
    mask = causal_mask(chunk, shape.context, shape.context)
    sets = []
    for data in caches.random(num_sets(caches.nbytes(shape.context))):
        packed = [
            PackedTensor.over(part.clone(), layout, DTYPE, "bhtd", size)
            for part, layout in zip(data, caches.layouts, strict=True)
        ]
        newest = dataclasses.replace(shape, context=chunk)
        sets.append((newest.query(chunk), *newest.key_and_value(), *packed, positions, mask))
    return sets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", type=argument(Shape.parse), default="1,32/8,128,32768", help="the context that a chunk extends"
    )
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a fresh prefill (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a continued chunk (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", type=argument(parse_fully_packed), default=fully_packed_formats())
    args = parse_arguments(parser, needs_backend=True)
    recorder = Recorder(args, Chart("shape", ("case", "format"), ("speedup",)))
    fresh = dataclasses.replace(args.shape, context=args.prompt)
    whole = dataclasses.replace(args.shape, context=args.shape.context + args.chunk)
    # A static cache has room for the answer.
    mask = causal_mask(args.prompt, args.prompt, args.prompt + args.chunk)
    with torch.no_grad():
        alone = time_baseline(recorder, "fresh prefill, SDPA alone", fresh, args.prompt)
        chunk_alone = time_baseline(recorder, "continued chunk, SDPA alone", whole, args.chunk)
        for name, pair in args.formats:
            inputs = functools.partial(prefill_inputs, fresh)
            time_layer(recorder, "fresh prefill, growing cache", fresh, name, prefill_growing, inputs, alone)
            inputs = functools.partial(prefill_inputs, fresh, mask)
            time_layer(recorder, "fresh prefill, static cache", fresh, name, prefill_static, inputs, alone)
            inputs = functools.partial(chunk_inputs, whole, args.chunk, pair)
            time_layer(recorder, "continued chunk, static cache", whole, name, continue_static, inputs, chunk_alone)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
