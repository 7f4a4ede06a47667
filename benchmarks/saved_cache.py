"""The time to check the digests of a saved cache: ``load_cache`` with and without ``verify``.

    python benchmarks/saved_cache.py [--shape 1,32/8,128,32768] [--layers 8] [--policy int8_per_token_head]

A packed cache of random tokens is saved to a temporary file, and loaded to the GPU if there is one. On a CPU a loaded
cache is a mapping of its file, so a load includes a copy of all its bytes. Loads with and without digests take turns.
*mapped* means that the file is in the page cache of the system; *cold* means that it was dropped from the page cache
before each load, as far as the system complies.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from llama import config, random_model
from recording import Chart, Recorder, argument, parse_arguments

import kvcompile
from kvcompile.benching.measuring import Timing
from kvcompile.benching.workloads import DEVICE, DTYPE, Shape


def seconds_to_load(path: Path, verify: bool, is_cold: bool) -> float:
    """The time of one load, until the device has all bytes."""
    if is_cold:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    begin = time.perf_counter()
    cache = kvcompile.load_cache(path, device=DEVICE, verify=verify)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    else:
        copy.deepcopy(cache)
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=argument(Shape.parse), default="1,32/8,128,32768", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--policy", default="int8_per_token_head", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=9, help="loads of each kind (default: %(default)s)")
    args = parse_arguments(parser, needs_cuda=False)
    recorder = Recorder(args, Chart("case", ("note",), ("speedup",)), DEVICE.type)
    model = random_model(config(args.shape, args.layers, 256), DTYPE, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "cache.safetensors"
        cache = kvcompile.static_cache(model, args.shape.batch, args.shape.context, args.policy)
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor.copy_(torch.randn(tensor.shape, dtype=DTYPE))
        kvcompile.save_cache(cache, path)
        size = path.stat().st_size
        for case in ("mapped", "cold"):
            taken: dict[bool, list[float]] = {False: [], True: []}
            for repeat in range(args.repeats + 1):
                for verify, seconds in taken.items():
                    found = seconds_to_load(path, verify, case == "cold")
                    if repeat:  # the first load imports and allocates
                        seconds.append(found)
            without = Timing.of(taken[False], "wall clock")
            for verify, seconds in taken.items():
                with recorder.row(case=case, shape=str(args.shape), format=args.policy) as row:
                    row["note"] = "with digests" if verify else "verify=False"
                    baseline = ("verify=False", without) if verify else None
                    row |= recorder.timed(Timing.of(seconds, "wall clock"), baseline=baseline)
                    row["megabytes"] = size / 1e6
                    row["terabytes_per_second"] = size / statistics.median(seconds) / 1e12
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
