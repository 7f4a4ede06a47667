"""Requests to ``generate()`` for benchmarks: equal requests, the times of their tokens, and empty compiler caches."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvcompile.benching.workloads import DEVICE


class Clock(BaseStreamer):
    """Records the time of each token of a request."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

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
        num_new_tokens: the number of tokens to decode.
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
            settings["cache_config"] = dict(settings["cache_config"])  # a copy, because Transformers removes entries
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

    def seconds_to_first_token(self) -> float:
        """The time of a request for one token. A streamer may get the first of several tokens a step later."""
        request = replace(self, num_new_tokens=1)
        synchronize()
        begin = time.perf_counter()
        request.run()
        synchronize()
        return time.perf_counter() - begin


def reset_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def empty_compiler_caches() -> Iterator[None]:
    """Inside the ``with`` block, Inductor and Triton use empty caches of compiled code."""
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


def add_request_arguments(parser: argparse.ArgumentParser, *, layers: int, new_tokens: int) -> None:
    """Add the options of the model, of a request and of the whole run, with these defaults."""
    parser.add_argument("--layers", type=int, default=layers, help="layers of the model (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=128256, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=int, default=new_tokens, help="tokens of an answer, at least 4 (default: %(default)s)"
    )
    parser.add_argument(
        "--merge-projections", action="store_true", help="merge small products, as the option of kvcompile does"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="rows that would begin later are skipped (default: %(default)s)"
    )
