"""Tokens per second of as many sequences as fit into a given memory according to ``kvcompile plan``.

    python benchmarks/throughput.py [--memory 75GiB] [--contexts 8192] [--policies bf16 int8_per_token_head ...]
                                    [--layers 32] [--new-tokens 24] [--seconds 540]

A Llama 3 8B with random weights in bfloat16 decodes with full caches. For every context and policy, the planner
computes how many users fit into the memory. The process may then allocate at most this memory, and ``generate()``
continues the conversations of this number of users, each with a static cache of random tokens. A row fails if the users
do not fit.

The policy ``bf16`` stands for plain caches, whose steps Transformers compiles. All other policies are arguments of
``kvcompile.compile``. The logits of the first user's last token are compared with an uncompiled step on the values that
the cache holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from generating import (
    LastLogits,
    Requests,
    add_request_arguments,
    empty_compiler_caches,
    forget_compiled,
    reset_peak,
    synchronize,
)
from llama import config, packed_layers, random_model
from recording import Chart, Recorder, Row, argument, parse_arguments

import kvcompile
from kvcompile.benching.errors import BenchError
from kvcompile.benching.measuring import Timing
from kvcompile.benching.workloads import DEVICE, DTYPE, Shape, check, relative_error
from kvcompile.compat.transformers import with_cache
from kvcompile.planning.make_plan import make_plan
from kvcompile.planning.plan import Request
from kvcompile.planning.units import parse_context, parse_size

PLAIN = "bf16"
POLICIES = [PLAIN, "bfloat16", "int8_per_token_head", "int4_per_token_head"]
MAX_ERROR = 0.1
"""The largest allowed relative error of logits. 32 layers that round to bfloat16 reach 0.06."""

FILLED_AT_ONCE = 1 << 27
"""The number of cache values that are drawn at once."""


def promised_users(model: dict[str, Any], policy: str, context: int, memory: int, reserve: int) -> int:
    """The number of users with ``context`` tokens each that fit according to the planner.

    Raises:
        BenchError: no user fits.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(model))
        plan = make_plan(Request(path, (policy,), (context,), memory, PLAIN, reserve))
    users = plan.policies[0].capacity["allocated"].users[context]
    if users == 0:
        raise BenchError(f"{policy}: not one user with {context} tokens fits; raise --memory, or lower --layers")
    return users


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[None]:
    """Inside the ``with`` block, PyTorch allocates at most ``nbytes`` on the GPU. A CPU has no limit."""
    if DEVICE.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties().total_memory
    if nbytes > total:
        raise BenchError(f"--memory is {nbytes} bytes, more than the {total} of this device")
    torch.cuda.set_per_process_memory_fraction(nbytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def filled_cache(model: Any, policy: str, shape: Shape) -> transformers.StaticCache:
    """A static cache of ``shape.context`` random tokens for each sequence: plain, or packed from the start."""
    if policy == PLAIN:
        cache = transformers.StaticCache(config=model.config, max_cache_len=shape.context)
        cache.early_initialization(shape.batch, shape.num_kv_heads, shape.head_dim, DTYPE, DEVICE)
    else:
        cache = kvcompile.static_cache(model, shape.batch, shape.context, policy)
    at_once = max(1, FILLED_AT_ONCE // (shape.num_kv_heads * shape.context * shape.head_dim))
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            for part in tensor.split(at_once):
                part.copy_(torch.randn(part.shape, dtype=DTYPE, device=DEVICE))
    return cache


def rewind(cache: transformers.StaticCache, num_tokens: int) -> None:
    """Make the next step write the token after the first ``num_tokens``."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(num_tokens)


def error_of_first_user(requests: Requests, cache: transformers.StaticCache, past: int) -> float:
    """The relative error of the first user's last logits, compared with an uncompiled step on the same values.

    Raises:
        ArithmeticError: the error is larger than MAX_ERROR.
    """
    last = LastLogits()
    tokens = requests.run(processors=(last,))
    kvcompile.uncompile(requests.model)
    one = transformers.StaticCache(config=requests.model.config, max_cache_len=cache.layers[0].keys.shape[2])
    for layer, source in zip(one.layers, cache.layers, strict=True):
        layer.lazy_initialization(source.keys[:1] + 0, source.values[:1] + 0)
        layer.keys.copy_(source.keys[:1])
        layer.values.copy_(source.values[:1])
    rewind(one, tokens.shape[1] - 2)
    expected = requests.model(input_ids=tokens[:1, -2:-1], **with_cache(requests.model, one)).logits[:, -1]
    return check(relative_error(last.logits[:1], expected), "the last token of the first user", MAX_ERROR)


def measure(recorder: Recorder, row: Row, policy: str, shape: Shape, args: argparse.Namespace) -> None:
    """Fill in the row of a policy for ``shape.batch`` users."""
    model = random_model(config(shape, args.layers, args.vocab_size), DTYPE, DEVICE)
    past = shape.context - args.new_tokens - 1
    prompt = torch.randint(args.vocab_size, (shape.batch, past + 1), device=DEVICE)
    reset_peak()
    with limited_memory(args.memory):
        cache = filled_cache(model, policy, shape)
        recorder.say(f"the caches of {shape.batch} users are filled")
        if policy != PLAIN:
            how = {"policy": policy, "merge_projections": args.merge_projections}
            kvcompile.compile(model, **how, on_unsupported="error")
        requests = Requests(model, prompt, args.new_tokens, with_cache(model, cache))
        clocks = []
        for repeat in range(args.repeats + 1):  # the first request compiles
            rewind(cache, past)
            clocks.append(requests.clocked())
            synchronize()
            recorder.say(f"request {repeat} is done")
    token = Timing.of([step for clock in clocks[1:] for step in clock.steps], "wall clock")
    row |= {"token_milliseconds": 1e3 * token.seconds, "spread": token.spread, "method": token.method}
    row |= {"tokens_per_second": shape.batch / token.seconds}
    row |= {"cache_megabytes": kvcompile.cache_nbytes(cache) / 1e6, "packed_layers": packed_layers(cache)}
    if DEVICE.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        row |= {"peak_megabytes": peak / 1e6, "of_memory": peak / args.memory}
    rewind(cache, past)
    row["relative_error"] = error_of_first_user(requests, cache, past)


def compare(recorder: Recorder, context: int, args: argparse.Namespace) -> None:
    """Add a row for every policy. The first measured policy is the baseline of the other rows."""
    baseline: Row | None = None
    for policy in args.policies:
        case, name = ("static", "plain") if policy == PLAIN else ("kvquant", policy)
        with recorder.row(case=case, format=name, context=context) as row:
            recorder.check_time(args.seconds)
            forget_compiled()
            one = Shape(1, *args.heads, args.head_dim, context)
            described = config(one, args.layers, args.vocab_size).to_dict() | {"dtype": "bfloat16"}
            users = promised_users(described, policy, context, args.memory, args.reserve)
            row["users"] = users
            recorder.say(f"{policy}, {context} tokens: the plan promises {users} users")
            measure(recorder, row, policy, Shape(users, *args.heads, args.head_dim, context), args)
            if baseline is None:
                baseline = row
            else:
                row["baseline"] = f"{baseline['case']}, {baseline['format']}"
                row["throughput"] = row["tokens_per_second"] / baseline["tokens_per_second"]


def heads(text: str) -> tuple[int, int]:
    """Parse ``HEADS/KV``, such as ``32/8``: the number of query heads and of KV heads."""
    shape = Shape.parse(f"1,{text},1,1")
    return shape.num_heads, shape.num_kv_heads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    size = argument(lambda text: parse_size(text, "a size"))
    parser.add_argument("--memory", type=size, default="75GiB", help="GPU memory to use (default: %(default)s)")
    parser.add_argument("--reserve", type=size, default="2GiB", help="part of it for other tensors (%(default)s)")
    contexts = argument(lambda text: parse_context(text, "--contexts"))
    parser.add_argument("--contexts", nargs="+", type=contexts, default=[8192], help="tokens per user (%(default)s)")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="presets or files (default: %(default)s)")
    parser.add_argument("--heads", type=argument(heads), default="32/8", help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=1, help="timed requests (default: %(default)s)")
    add_request_arguments(parser, layers=32, new_tokens=24)
    args = parse_arguments(parser, needs_cuda=False)
    chart = Chart("context", ("case", "format"), ("tokens_per_second", "throughput"))
    recorder = Recorder(args, chart, DEVICE.type)
    with torch.no_grad(), empty_compiler_caches():
        for context in args.contexts:
            compare(recorder, context, args)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
