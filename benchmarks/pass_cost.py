"""The time that our passes add to compiling a decode step of a deep model.

    python benchmarks/pass_cost.py [--layers 32] [--policy int4_per_token_head] [--device cpu]

Compiles one decode step of a small Llama with a static cache, without using caches of compiled code. Prints the time
spent in the passes and the time spent in the whole backend, as Dynamo's timers measure them. It also prints the time of
the passes as a percentage of the remaining time in the backend.
"""

from __future__ import annotations

import argparse
import platform

import torch
import transformers
from llama import small_config
from torch._dynamo.utils import compilation_time_metrics

from kvcompile.compat.transformers import with_cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--policy", default="int4_per_token_head")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    config = small_config(arguments.layers)
    model = transformers.LlamaForCausalLM(config).eval().to(device=arguments.device, dtype=torch.bfloat16)
    cache = transformers.StaticCache(config=config, max_cache_len=1024)
    ids = torch.zeros(1, 1, dtype=torch.long, device=arguments.device)
    options = {"policy": arguments.policy, "fx_graph_cache": False}
    compiled = torch.compile(model, backend="kvquant", options=options)
    with torch.no_grad():
        model(input_ids=ids, **with_cache(model, cache))
        compiled(input_ids=ids, **with_cache(model, cache))

    passes = sum(sum(times) for name, times in compilation_time_metrics.items() if name.startswith("kvquant_"))
    backend = sum(compilation_time_metrics["OutputGraph.call_user_compiler"])
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    print(f"{arguments.layers} layers, {arguments.policy}, {name}, torch {torch.__version__}")
    print(f"passes {passes:.2f} s of {backend:.2f} s in the backend: {100 * passes / (backend - passes):.1f} % on top")


if __name__ == "__main__":
    main()
