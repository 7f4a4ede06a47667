"""``generate()`` of a Hugging Face Llama as a user feels it: first call, first token, each further token, memory.

    python benchmarks/generate.py [--shapes 1,32/8,128,1024 8,32/8,128,4096 ...] [--policies int8_per_token_head ...]
                                  [--cases static dynamic quanto hqq] [--layers 8] [--new-tokens 64] [--seconds 540]

A model as wide as Llama 3 8B, with random weights in bfloat16, reads a prompt and decodes tokens greedily. The context
of a shape is the length of the prompt. Each row has a model of its own, and its requests go through the public
``generate()`` alone:

- ``static`` and ``dynamic``: plain caches of Transformers. Transformers compiles the steps of the static one on GPUs.
- ``quanto`` and ``hqq``: the ``QuantizedCache`` of Transformers with 4 bits, if the package is installed.
- ``kvquant``: the model after ``kvcompile.compile(model, policy=...)``, for each policy.

The first request is timed as a whole, with all compilation. Later requests give the other times, as a streamer sees
them. The logits of the last token are then compared with those of the plain model, which reads all tokens at once.
Inductor and Triton begin with empty caches on disk; a row may use kernels that an earlier row has compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llama import config, random_model
from recording import Chart, Recorder, Row, argument, parse_arguments
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import kvcompile
from kvcompile.benching.machine import installed_version
from kvcompile.benching.measuring import Timing
from kvcompile.benching.workloads import DEVICE, DTYPE, Shape, check, relative_error
from kvcompile.policy.policy import Policy

SHAPES = [Shape.parse(text) for text in ("1,32/8,128,1024", "1,32/8,128,16384", "8,32/8,128,4096", "32,32/8,128,1024")]
POLICIES = ["int8_per_token_head", "int4_per_token_head"]
MAX_ERROR = 0.5
"""The largest relative error of logits. Each layer adds the error of 4 bits; logits of other tokens differ by 1.4."""


@dataclass(frozen=True)
class Case:
    """A way to call ``generate()``.

    Attributes:
        name: what the row is called.
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


class Clock(BaseStreamer):
    """Notes the time of each token of a request."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def to_first_token(self) -> float:
        """Seconds until the first new token; before it, the streamer gets the prompt."""
        return self.times[2] - self.times[0]

    @property
    def steps(self) -> list[float]:
        """Seconds between tokens, from the second new token on."""
        return [after - before for before, after in zip(self.times[2:], self.times[3:], strict=False)]


class LastLogits:
    """A logits processor that changes nothing and keeps the logits of the last step."""

    logits: Tensor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits = scores
        return scores


@dataclass(frozen=True)
class Requests:
    """Equal requests to one model.

    Attributes:
        model: the model.
        prompt: token ids, [batch, context].
        num_new_tokens: how many tokens to decode.
        settings: further keywords of ``generate()``.
    """

    model: Any
    prompt: Tensor
    num_new_tokens: int
    settings: dict[str, Any]

    def run(self, clock: Clock | None = None, processors: tuple[Any, ...] = ()) -> Tensor:
        """Token ids of the prompt and the answer, [batch, context + num_new_tokens]."""
        settings = {**self.settings}
        if "cache_config" in settings:
            settings["cache_config"] = dict(settings["cache_config"])  # Transformers takes entries out of it
        return self.model.generate(
            input_ids=self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            max_new_tokens=self.num_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=clock,
            logits_processor=list(processors),
            **settings,
        )

    def clocked(self) -> Clock:
        clock = Clock()
        self.run(clock)
        return clock

    def error(self) -> float:
        """The relative error of the last logits to those of the plain model, which is uncompiled for it.

        Raises:
            ArithmeticError: the error is larger than MAX_ERROR.
        """
        last = LastLogits()
        tokens = self.run(processors=(last,))
        kvcompile.uncompile(self.model)
        expected = self.model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=1).logits[:, 0]
        return check(relative_error(last.logits, expected), "the last token of generate()", MAX_ERROR)


@dataclass(frozen=True)
class Felt:
    """Times of a case: of a whole first request, until the first token, and of a token."""

    first_call: float
    first_token: Timing
    token: Timing


def measure(recorder: Recorder, row: Row, case: Case, shape: Shape, args: argparse.Namespace) -> Felt:
    """Fill in the row of a case, and return its times."""
    model = random_model(config(shape, args.layers, args.vocab_size, room=args.new_tokens), DTYPE, DEVICE)
    prompt = torch.randint(args.vocab_size, (shape.batch, shape.context), device=DEVICE)
    if case.policy is not None:
        kvcompile.compile(model, policy=case.policy, on_unsupported="error")
    requests = Requests(model, prompt, args.new_tokens, case.settings)
    reset_peak()
    begin = time.perf_counter()
    requests.run()
    synchronize()
    first_call = time.perf_counter() - begin
    recorder.say(f"the first call took {first_call:.1f} s")
    clocks = [requests.clocked() for _ in range(args.repeats)]
    first_token = Timing.of([clock.to_first_token for clock in clocks], "wall clock")
    token = Timing.of([step for clock in clocks for step in clock.steps], "wall clock")
    row |= {"first_call_seconds": first_call, "first_token_milliseconds": 1e3 * first_token.seconds}
    row |= {"token_milliseconds": 1e3 * token.seconds, "spread": token.spread}
    row |= {"tokens_per_second": shape.batch / token.seconds, "method": token.method}
    if DEVICE.type == "cuda":
        row["peak_megabytes"] = torch.cuda.max_memory_allocated() / 1e6
    row["relative_error"] = requests.error()
    return Felt(first_call, first_token, token)


def reset_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def empty_compiler_caches() -> Iterator[None]:
    """In the block, Inductor and Triton find none of the code that other processes compiled."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.pop(name, None) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({name: str(Path(folder) / name.lower()) for name in names})
        try:
            yield
        finally:
            for name in names:
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def forget_compiled() -> None:
    """Free the model of the last row, its compiled code and its CUDA graphs."""
    torch._dynamo.reset()
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def compare(recorder: Recorder, shape: Shape, cases: list[Case], args: argparse.Namespace) -> None:
    """Add a row for each case. The first case that could be measured is the baseline of the others."""
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
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=128256, help="of the model (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a request, at least 4 (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed requests, at least 2 (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=540, help="rows that begin later are left out (default: %(default)s)"
    )
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
