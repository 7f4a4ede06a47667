"""The host's time for a compiled decode step, without CUDA graphs, compared with plain Inductor.

    python benchmarks/host_time.py [--layers 16] [--policies int4_per_token_head int4] [--device cuda]

A small Llama with a static cache decodes one token. On a GPU its kernels take less time than their launches, so the
time of a step is the work of the host: guards, the wrapper of a packed call, and launches. Plain ``torch.compile`` and
the policies take turns, and the table has medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers
from llama import packed_layers, small_config

import kvcompile
from kvcompile.benching.machine import describe_device
from kvcompile.benching.measuring import time_in_turns
from kvcompile.compat.transformers import with_cache

STEPS = 20
"""Steps between two synchronizations of the device."""


def steps_of(model: Any, policy: str | None, context: int) -> Callable[[], None]:
    """A function that runs STEPS compiled decode steps from the beginning of a static cache. It has run once.

    The cache is packed; without a policy it is plain.
    """
    cache: Any
    if policy is None:
        backend: Any = "inductor"
        cache = transformers.StaticCache(config=model.config, max_cache_len=context)
    else:
        backend = kvcompile.kvquant(policy=policy, on_unsupported="error")
        cache = kvcompile.static_cache(model, 1, context, policy)
    compiled = torch.compile(model, backend=backend)
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    model(input_ids=ids, **with_cache(model, cache))  # Transformers makes the layers of the cache

    def run() -> None:
        for layer in cache.layers:
            layer.cumulative_length.zero_()
        for _ in range(STEPS):
            compiled(input_ids=ids, **with_cache(model, cache))
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    run()
    if policy is not None and packed_layers(cache) != model.config.num_hidden_layers:
        raise RuntimeError(f"{policy}: only {packed_layers(cache)} layers are packed")
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=256, help="slots of the cache (default: %(default)s)")
    parser.add_argument("--policies", nargs="+", default=["bfloat16", "int8_per_token_head", "int4_per_token_head"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    arguments = parser.parse_args()

    name = describe_device(torch.device(arguments.device))["name"]
    print(f"{arguments.layers} layers, {name}, torch {torch.__version__}")
    config = small_config(arguments.layers)
    model = transformers.LlamaForCausalLM(config).eval().to(device=arguments.device, dtype=torch.bfloat16)
    cases = [None, *arguments.policies]
    with torch.no_grad():
        timings = time_in_turns([steps_of(model, policy, arguments.context) for policy in cases])
    plain = timings[0].microseconds
    for policy, timing in zip(cases, timings, strict=True):
        step = timing.microseconds / STEPS
        print(f"{policy or 'plain torch.compile':24} {step:8.0f} us a step ({timing.microseconds / plain:.2f})")


if __name__ == "__main__":
    main()
