"""A decode step on a CPU: ``kvquant`` compared with plain Inductor, for models in bfloat16 and in float32.

    python benchmarks/cpu_decode.py [--shape 1,16/4,64,4096] [--policies int8_per_token_head int4_per_token_head]
    python benchmarks/cpu_decode.py --shape 1,4/2,64,256 --contexts 64 256 1024 4096 --threads 1 2 --layers 2

The program times one attention module of a Hugging Face Llama, and a whole small model, with a static cache full of
random values. The baseline is plain Inductor. Plain and packed steps take turns, so that other load on the machine
slows both equally. Results are first compared with the uncompiled module on a plain cache with the dequantized values.
The relative overhead of packing is larger for smaller models and shorter contexts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from llama import Run, check_step, config, packed_layers, random_cache, random_model, rewind
from recording import Chart, Recorder, argument, parse_arguments
from torch import Tensor

import kvcompile
from kvcompile.benching.measuring import Timing, time_in_turns
from kvcompile.benching.workloads import Shape
from kvcompile.compat.transformers import with_cache

CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
POLICIES = ["int8_per_token_head", "int4_per_token_head", "int4", "turboquant_4bit_nc", "fp8_e4m3"]


@dataclass(frozen=True)
class CompiledStep:
    """One step of a compiled module, with its own cache.

    Attributes:
        run: runs the step.
        cache: the cache.
        relative_error: the relative error of the result.
    """

    run: Callable[[], Tensor]
    cache: transformers.StaticCache
    relative_error: float


@torch.no_grad()
def attention_module(model: Any, shape: Shape) -> tuple[Any, Run]:
    """The attention module of the first layer, and a function that runs a step of it."""
    hidden = torch.randn(shape.batch, 1, model.config.hidden_size, dtype=model.dtype)
    embeddings = model.model.rotary_emb(hidden, torch.full((shape.batch, 1), shape.context - 1))
    mask = torch.ones(shape.batch, 1, 1, shape.context, dtype=torch.bool)

    module = model.model.layers[0].self_attn

    def run(attention: Any, cache: transformers.StaticCache) -> Tensor:
        return attention(hidden, embeddings, mask, **with_cache(module, cache))[0]

    return module, run


def whole_model(model: Any, shape: Shape) -> tuple[Any, Run]:
    """The model itself, and a function that runs a step of it."""
    ids = torch.zeros(shape.batch, 1, dtype=torch.long)
    return model, lambda compiled, cache: compiled(input_ids=ids, **with_cache(model, cache)).logits


WORKLOADS = {"attention module": attention_module, "whole model": whole_model}


def compile_step(module: Any, run: Run, shape: Shape, dtype: torch.dtype, **compile_arguments: Any) -> CompiledStep:
    """Compile ``module`` with a new cache, and check a step of it."""
    compiled = torch.compile(module, **compile_arguments)
    cache = random_cache(module.config, shape, dtype, CPU)
    for _ in range(2):  # the first call packs the cache
        rewind(cache)
        result = run(compiled, cache)
    return CompiledStep(functools.partial(run, compiled, cache), cache, check_step(result, run, module, shape, cache))


def take_turns(steps: list[CompiledStep], repeats: int) -> list[Timing]:
    """The time of each of ``steps``, which run one after the other, ``repeats`` times."""
    return time_in_turns([step.run for step in steps], repeats=repeats, before=lambda index: rewind(steps[index].cache))


def compare(recorder: Recorder, workload: str, shape: Shape, dtype: str, args: argparse.Namespace) -> None:
    """Add a row for plain Inductor, and a row for every policy."""
    torch._dynamo.reset()
    layers = args.layers if workload == "whole model" else 1
    model = random_model(config(shape, layers, args.vocab_size), DTYPES[dtype], CPU)
    module, run = WORKLOADS[workload](model, shape)
    compiled = functools.partial(compile_step, module, run, shape, DTYPES[dtype])
    labels = {"case": workload, "shape": str(shape), "dtype": dtype, "threads": torch.get_num_threads()}
    plain: list[CompiledStep] = []
    with recorder.row(**labels, format="plain") as row:
        plain.append(compiled())
        row |= recorder.timed(take_turns(plain, args.repeats)[0])
        row |= facts(plain[0])
    for policy in args.policies:
        with recorder.row(**labels, format=policy) as row:
            packed = compiled(backend="kvquant", options={"policy": policy, "on_unsupported": "error"})
            timing, *baseline = take_turns([packed, *plain], args.repeats)
            row |= recorder.timed(timing, baseline=("plain Inductor", baseline[0]) if baseline else None)
            row |= facts(packed)


def facts(step: CompiledStep) -> dict[str, float]:
    """The keys of a row other than times."""
    return {
        "relative_error": step.relative_error,
        "packed_layers": packed_layers(step.cache),
        "cache_megabytes": kvcompile.cache_nbytes(step.cache) / 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=argument(Shape.parse), default="1,16/4,64,4096", help="default: %(default)s")
    parser.add_argument("--contexts", nargs="+", type=int, help="tokens of the cache (default: from --shape)")
    parser.add_argument("--cases", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: both")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="presets or files (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the whole model (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=8192, help="size of its vocabulary (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=50, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()], help="default: PyTorch's")
    args = parse_arguments(parser, needs_cuda=False, needs_backend=True)
    recorder = Recorder(args, Chart("case", ("threads", "shape", "dtype", "format"), ("speedup",)), "cpu")
    # All variants of a module share a code object, for which Dynamo keeps only eight versions by default.
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        for threads, context in itertools.product(args.threads, args.contexts or [args.shape.context]):
            torch.set_num_threads(threads)
            shape = dataclasses.replace(args.shape, context=context)
            for workload, dtype in itertools.product(args.cases, args.dtypes):
                compare(recorder, workload, shape, dtype, args)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
