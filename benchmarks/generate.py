"""The times and memory of ``generate()`` of a Hugging Face Llama: first call, first token, each further token.

    python benchmarks/generate.py [--shapes 1,32/8,128,1024 8,32/8,128,4096 ...] [--policies int8_per_token_head ...]
                                  [--cases static dynamic quanto hqq] [--layers 8] [--new-tokens 64] [--seconds 540]
                                  [--sliding-window 4096]

A model as wide as Llama 3 8B, with random weights in bfloat16, reads a prompt and decodes tokens greedily. The context
of a shape is the length of the prompt. Each row has its own model, and its requests use only the public ``generate()``:

- ``static`` and ``dynamic``: plain caches of Transformers. Transformers compiles the steps of the static one on GPUs.
- ``quanto`` and ``hqq``: the ``QuantizedCache`` of Transformers with 4 bits, if the package is installed.
- ``kvquant``: the model after ``kvcompile.compile(model, policy=...)``, for each policy.

The first request is timed as a whole, including compilation. The other times come from later requests: a streamer
measures further tokens, and requests for one token measure the first. The logits of the last token are then compared
with the logits of the plain model, which reads all tokens at once. Inductor and Triton begin with empty caches on disk;
a row may use kernels that an earlier row has compiled.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from generating import (
    LastLogits,
    Requests,
    add_request_arguments,
    empty_compiler_caches,
    forget_compiled,
    reset_peak,
    synchronize,
)
from llama import config, random_model
from recording import Chart, Recorder, Row, argument, parse_arguments

import kvcompile
from kvcompile.benching.machine import installed_version
from kvcompile.benching.measuring import Timing
from kvcompile.benching.workloads import DEVICE, DTYPE, Shape, check, relative_error
from kvcompile.policy.policy import Policy

SHAPES = [Shape.parse(text) for text in ("1,32/8,128,1024", "1,32/8,128,16384", "8,32/8,128,4096", "32,32/8,128,1024")]
POLICIES = ["int8_per_token_head", "int4_per_token_head"]
MAX_ERROR = 0.3
"""The largest allowed relative error of logits. Each layer adds a 4-bit error; logits of wrong tokens differ by 1.4."""


@dataclass(frozen=True)
class Case:
    """A way to call ``generate()``.

    Attributes:
        name: the name of the row.
        format: the format of the cache.
        settings: keywords of ``generate()``.
        policy: the policy of ``kvcompile.compile``; None if the model is not compiled by kvcompile.
        package: a package that the case needs.
    """

    name: str
    format: str = "plain"
    settings: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None
    package: str = "transformers"


def quantized(backend: str, package: str) -> Case:
    """The case of Transformers' own quantized cache."""
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": backend, "nbits": 4}}
    return Case(backend, "int4", settings, package=package)


CASES = {
    case.name: case
    for case in (
        Case("static", settings={"cache_implementation": "static"}),
        Case("dynamic"),
        quantized("quanto", "optimum-quanto"),
        quantized("hqq", "hqq"),
    )
}


@dataclass(frozen=True)
class Felt:
    """Times of a case: a whole first request, the time to the first token, and the time of each further token."""

    first_call: float
    first_token: Timing
    token: Timing


def error_of_last_token(requests: Requests) -> float:
    """The relative error of the last logits, compared with the plain model, which is uncompiled for this.

    Raises:
        ArithmeticError: the error is larger than MAX_ERROR.
    """
    last = LastLogits()
    tokens = requests.run(processors=(last,))
    kvcompile.uncompile(requests.model)
    expected = requests.model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=1).logits[:, 0]
    return check(relative_error(last.logits, expected), "the last token of generate()", MAX_ERROR)


def model_for(shape: Shape, args: argparse.Namespace) -> Any:
    """A model whose embeddings have unit variance.

    As in a trained model, the output of the first attention is then small compared with the embeddings. With the
    initial values of Transformers it is larger than the embeddings, and later layers amplify the error of 4-bit formats
    until the logits are wrong.
    """
    made = config(shape, args.layers, args.vocab_size, room=args.new_tokens, sliding_window=args.sliding_window)
    model = random_model(made, DTYPE, DEVICE)
    model.get_input_embeddings().weight.normal_()
    return model


def measure(recorder: Recorder, row: Row, case: Case, shape: Shape, args: argparse.Namespace) -> Felt:
    """Fill in the row of a case, and return its times."""
    model = model_for(shape, args)
    prompt = torch.randint(args.vocab_size, (shape.batch, shape.context), device=DEVICE)
    if case.policy is not None:
        how = {"policy": case.policy, "merge_projections": args.merge_projections}
        kvcompile.compile(model, **how, on_unsupported="error")
    requests = Requests(model, prompt, args.new_tokens, case.settings)
    reset_peak()
    begin = time.perf_counter()
    requests.run()
    synchronize()
    first_call = time.perf_counter() - begin
    recorder.say(f"the first call took {first_call:.1f} s")
    clocks = [requests.clocked() for _ in range(args.repeats)]
    first_token = Timing.of([requests.seconds_to_first_token() for _ in range(args.repeats)], "wall clock")
    token = Timing.of([step for clock in clocks for step in clock.steps], "wall clock")
    row |= {"first_call_seconds": first_call, "first_token_milliseconds": 1e3 * first_token.seconds}
    row |= {"token_milliseconds": 1e3 * token.seconds, "spread": token.spread}
    row |= {"tokens_per_second": shape.batch / token.seconds, "method": token.method}
    if DEVICE.type == "cuda":
        row["peak_megabytes"] = torch.cuda.max_memory_allocated() / 1e6
    row["relative_error"] = error_of_last_token(requests)
    return Felt(first_call, first_token, token)


def compare(recorder: Recorder, shape: Shape, cases: list[Case], args: argparse.Namespace) -> None:
    """Add a row for each case. The first measured case is the baseline of the other rows."""
    baseline: tuple[str, Felt] | None = None
    for case in cases:
        with recorder.row(case=case.name, shape=str(shape), format=case.format) as row:
            recorder.check_time(args.seconds)
            if installed_version(case.package) is None:
                row["note"] = f"not measured: {case.package} is not installed"
                continue
            forget_compiled()
            recorder.say(f"{case.name}, {case.format}, {shape}: begins")
            felt = measure(recorder, row, case, shape, args)
            if baseline is None:
                baseline = case.name, felt
                continue
            name, usual = baseline
            row |= {"baseline": name, "speedup": usual.token.seconds / felt.token.seconds}
            row["first_token_speedup"] = usual.first_token.seconds / felt.first_token.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=argument(Shape.parse), default=SHAPES)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="default: %(default)s")
    parser.add_argument("--policies", nargs="*", default=POLICIES, help="presets or files (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed requests, at least 2 (default: %(default)s)")
    parser.add_argument("--sliding-window", type=int, help="tokens of the window of all layers (default: no window)")
    add_request_arguments(parser, layers=8, new_tokens=64)
    args = parse_arguments(parser, needs_cuda=False)
    for policy in args.policies:
        try:
            Policy.load(policy)
        except kvcompile.PolicyError as error:
            parser.error(str(error))
    cases = [CASES[name] for name in args.cases]
    cases += [Case("kvquant", policy, policy=policy) for policy in args.policies]
    values = ("speedup", "first_token_speedup")
    recorder = Recorder(args, Chart("shape", ("case", "format"), values), DEVICE.type)
    with torch.no_grad(), empty_compiler_caches():
        for shape in args.shapes:
            compare(recorder, shape, cases, args)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
