"""The first two calls of a compiled model in a new process, without and with compiled code on disk.

    python benchmarks/warm_start.py [--layers 16] [--policy int8_per_token_head] [--device cpu] [--mode reduce-overhead]

A small Llama with a static cache decodes one token. Each case is measured in separate processes, first with empty
caches of compiled code, and then ``--repeats`` times with the caches that the first process filled. The warm processes
of all cases take turns, and their medians are printed. The cases are:

- plain ``torch.compile``;
- ``kvquant`` with a cache that is packed from the start;
- ``kvquant`` with a plain cache of the caller, which the first call packs;
- the same without stored code of AOTAutograd: the passes run in every process.

Times are wall clock seconds of each call, without imports. With ``--processor`` they are the processor seconds of all
threads and compilers, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from llama import small_config

import kvcompile
from kvcompile.benching.machine import describe_device
from kvcompile.compat.transformers import with_cache

CASES = {
    "plain": "plain torch.compile",
    "packed": "kvquant, cache packed from the start",
    "adopted": "kvquant, plain cache of the caller",
    "without code": "the same, without stored code",
}


def seconds_of_two_calls(case: str, arguments: argparse.Namespace) -> list[float]:
    """Compile and run the model in this process; the seconds of each call."""
    config = small_config(arguments.layers)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = transformers.LlamaForCausalLM(config).eval().to(device=arguments.device, dtype=dtype)
    if case == "packed":
        cache = kvcompile.static_cache(model, 1, 1024, arguments.policy)
    else:
        cache = transformers.StaticCache(config=config, max_cache_len=1024)
    backend = "inductor" if case == "plain" else kvcompile.kvquant(policy=arguments.policy, on_unsupported="error")
    compiled = torch.compile(model, backend=backend, mode=arguments.mode)
    ids = torch.zeros(1, 1, dtype=torch.long, device=arguments.device)
    seconds = []
    with torch.no_grad():
        model(input_ids=ids, **with_cache(model, cache))
        for _ in range(2):
            begin = now(arguments.processor)
            compiled(input_ids=ids, **with_cache(model, cache))
            if arguments.device != "cpu":
                torch.cuda.synchronize()
            seconds.append(now(arguments.processor) - begin)
    return seconds


def now(processor: bool) -> float:
    """Seconds of wall clock time, or the processor seconds of this process and of the compilers that it has run."""
    return sum(os.times()[:4]) if processor else time.perf_counter()


def in_process(case: str, arguments: argparse.Namespace, caches: str) -> list[float]:
    """:func:`seconds_of_two_calls` in a new process, with its caches of compiled code in the folder ``caches``."""
    settings = {name: str(Path(caches, name.lower())) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    if case == "without code":
        settings["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    command = [sys.executable, __file__, "--case", case, "--layers", str(arguments.layers)]
    command += ["--policy", arguments.policy, "--device", arguments.device]
    command += ["--mode", arguments.mode] if arguments.mode is not None else []
    if arguments.processor:
        command.append("--processor")
        # More compile threads are worker processes, whose seconds :func:`now` would miss: they end after this process.
        settings["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    done = subprocess.run(command, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True)
    return [float(seconds) for seconds in done.stdout.split()[-2:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--policy", default="int8_per_token_head", help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--mode", help="a mode of torch.compile, such as reduce-overhead for CUDA graphs")
    parser.add_argument("--processor", action="store_true", help="count processor seconds instead of wall clock time")
    parser.add_argument("--repeats", type=int, default=3, help="warm processes of each case; default: %(default)s")
    parser.add_argument("--case", choices=CASES, help="measure one case in this process, and print its seconds")
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(*seconds_of_two_calls(arguments.case, arguments))
        return

    name = describe_device(torch.device(arguments.device))["name"]
    mode = f", mode {arguments.mode}" if arguments.mode is not None else ""
    print(f"{arguments.layers} layers, {arguments.policy}{mode}, {name}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        caches = {case: str(Path(folder, str(number))) for number, case in enumerate(CASES)}
        cold, *turns = [
            {case: in_process(case, arguments, caches[case]) for case in CASES} for _ in range(1 + arguments.repeats)
        ]
    warm = {
        case: [statistics.median(call) for call in zip(*(turn[case] for turn in turns), strict=True)] for case in CASES
    }
    for case, title in CASES.items():
        parts = [
            f"{where} {calls[case][0]:5.1f} + {calls[case][1]:5.1f} s ({sum(calls[case]) / sum(calls['plain']):.2f})"
            for where, calls in (("cold", cold), ("warm", warm))
        ]
        print(f"{title:40} {'   '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
