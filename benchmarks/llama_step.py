"""The decode step of a Hugging Face Llama: ``kvquant`` compared with plain ``torch.compile``.

    python benchmarks/llama_step.py [--shapes 8,32/8,128,32768 ...] [--policies int4_per_token_head ...]
                                    [--modes default reduce-overhead] [--layers 8]

A model as wide as Llama 3 8B, with fewer layers and random weights in bfloat16, decodes one token. Its static cache is
full of random values except for the last token. For every shape and mode, this measures the time of a step, the memory,
and the floor: the time to read the cache and all weights except the input embeddings once. The baseline is plain
``torch.compile`` in the same mode. Before a step is timed, its logits are compared with the logits of the uncompiled
model on a plain cache with the dequantized values.
"""

from __future__ import annotations

import argparse
import functools
import gc
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from llama import check_step, config, packed_layers, random_cache, random_model, rewind
from recording import Chart, Recorder, Row, argument, parse_arguments
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.benching.measuring import Timing, time_steps
from kvcompile.benching.workloads import DEVICE, DTYPE, Shape
from kvcompile.compat.transformers import with_cache
from kvcompile.policy.policy import Policy

SHAPES = [Shape.parse(text) for text in ("8,32/8,128,32768", "1,32/8,128,131072")]
POLICIES = ["bfloat16", "int8_per_token_head", "int4_per_token_head"]
MODES = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
}
"""Modes of ``torch.compile`` as the equivalent options, because a mode cannot be combined with options."""


@dataclass(frozen=True)
class Baseline:
    """The plain step with which rows are compared: its time, its peak memory, and the size of its cache."""

    timing: Timing
    peak_bytes: int
    cache_bytes: int


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads: all except the input embeddings, whose rows are mostly unread."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total - model.get_input_embeddings().weight.nbytes


def measure(
    recorder: Recorder, row: Row, model: Any, shape: Shape, compiled: Any, baseline: Baseline | None
) -> Baseline:
    """Fill in the row of a compiled model, and return it as a baseline for other rows."""
    ids = torch.zeros(shape.batch, 1, dtype=torch.long, device=DEVICE)

    def run(step: Any, cache: transformers.StaticCache) -> Tensor:
        return step(input_ids=ids, **with_cache(model, cache)).logits

    def begin_step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        rewind(cache)

    cache = random_cache(model.config, shape, DTYPE, DEVICE)
    for _ in range(5):  # the first call packs the cache, and CUDA graphs are recorded later
        begin_step()
        logits = run(compiled, cache).clone()
    row["relative_error"] = check_step(logits, run, model, shape, cache)
    torch.cuda.reset_peak_memory_stats()
    timing = time_steps(functools.partial(run, compiled, cache), begin_step)
    peak_bytes, cache_bytes = torch.cuda.max_memory_allocated(), kvcompile.cache_nbytes(cache)
    nbytes = weight_bytes(model) + cache_bytes
    row |= recorder.timed(timing, nbytes, None if baseline is None else ("torch.compile", baseline.timing))
    row["floor_microseconds"] = 1e6 * nbytes / recorder.results.ceilings["read"]
    row |= {"packed_layers": packed_layers(cache), "cache_megabytes": cache_bytes / 1e6}
    row["peak_megabytes"] = peak_bytes / 1e6
    if baseline is not None:
        row["peak_saved"] = (baseline.peak_bytes - peak_bytes) / baseline.cache_bytes
    if skips := counters["inductor"]["cudagraph_skips"]:
        row["note"] = f"CUDA graphs were skipped {skips} times"
    return Baseline(timing, peak_bytes, cache_bytes)


def forget_compiled() -> None:
    """Free the memory of compiled code and CUDA graphs, and reset the counters."""
    torch._dynamo.reset()
    counters.clear()
    gc.collect()


def compare(recorder: Recorder, model: Any, shape: Shape, mode: str, args: argparse.Namespace) -> None:
    """Add a row for the plain model, and a row for every policy."""
    baseline = None
    with recorder.row(case="torch.compile", shape=str(shape), format="plain", mode=mode) as row:
        forget_compiled()
        baseline = measure(recorder, row, model, shape, torch.compile(model, options=dict(MODES[mode])), None)
    for policy in args.policies:
        with recorder.row(case="kvquant", shape=str(shape), format=policy, mode=mode) as row:
            forget_compiled()
            options = {"policy": policy, "on_unsupported": "error", **MODES[mode]}
            options["merge_projections"] = args.merge_projections
            compiled = torch.compile(model, backend="kvquant", options=options)
            measure(recorder, row, model, shape, compiled, baseline)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=argument(Shape.parse), default=SHAPES)
    parser.add_argument("--policies", nargs="*", default=POLICIES, help="presets or files (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["default"], help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=128256, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument(
        "--merge-projections", action="store_true", help="merge small products, as the option of kvcompile does"
    )
    args = parse_arguments(parser, needs_backend=True)
    for policy in args.policies:
        try:
            Policy.load(policy)
        except kvcompile.PolicyError as error:
            parser.error(str(error))
    recorder = Recorder(args, Chart("shape", ("case", "format", "mode"), ("of_read_ceiling", "speedup")))
    with torch.no_grad():
        for shape in args.shapes:
            model = random_model(config(shape, args.layers, args.vocab_size), DTYPE, DEVICE)
            for mode in args.modes:
                compare(recorder, model, shape, mode, args)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
