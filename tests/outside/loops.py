"""Drives a reference model plainly and packed, and compares its tokens and logits."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from node_by_node import running_node_by_node
from outside.plugin import BOUND, LOSSLESS, counts
from outside.reference_models import Reference
from outside.running import CRASHED, TestRun
from outside.verdict import Verdict, compare
from torch import Tensor

import kvcompile

MAX_ERROR = 2e-5
"""Largest relative L2 error of the logits in a lossless format."""

TIMEOUT = 600


def judge(reference: Reference, sources: Path, policy: str = LOSSLESS, log: Path | None = None) -> Verdict:
    """The verdict of a reference model: it runs with ``aot_eager``, and then with ``kvquant``, in another process."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    args = (reference, sources / reference.source, policy, sending, log)
    process = multiprocessing.get_context("fork").Process(target=_judge, args=args)
    process.start()
    sending.close()
    try:
        run = receiving.recv() if receiving.poll(TIMEOUT) else TestRun(reference.name, CRASHED, "it took too long")
    except EOFError:
        process.join()
        run = TestRun(reference.name, CRASHED, f"its process ended with {process.exitcode}")
    process.kill()
    process.join()
    plain = TestRun(reference.name, "passed")
    return compare(reference.name, f"its loop, {policy}", {plain.test: plain}, {run.test: run})


def _judge(reference: Reference, folder: Path, policy: str, sending: Any, log: Path | None) -> None:
    output = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        sending.send(_run(reference, folder, policy))
    finally:
        sending.close()


def _run(reference: Reference, folder: Path, policy: str) -> TestRun:
    plain = partial(torch.compile, backend="aot_eager")
    packed = partial(torch.compile, backend=kvcompile.kvquant(policy=policy, on_unsupported="ignore"))
    with running_node_by_node(operators=True), contextlib.ExitStack() as reports:
        expected = reference.run(folder, plain)
        torch._dynamo.reset()
        report = reports.enter_context(kvcompile.collect_reports())
        found = reference.run(folder, packed)
    message = difference(expected, found, MAX_ERROR if policy == LOSSLESS else BOUND, policy == LOSSLESS)
    outcome = "failed" if message else "passed"
    return TestRun(reference.name, outcome, message, **counts(report))


def difference(
    expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], max_error: float, same_tokens: bool
) -> str:
    """How tokens or logits differ; an empty text if they do not. A lossy format may choose another token.

    Logits are compared up to the first step whose most likely tokens differ.
    """
    if same_tokens and not torch.equal(expected[0], found[0]):
        return f"its tokens differ: {found[0].tolist()} instead of {expected[0].tolist()}"
    one, other = expected[1], found[1]
    if same_tokens and one.shape != other.shape:
        return f"its logits have the shape {tuple(other.shape)} instead of {tuple(one.shape)}"
    steps = min(len(one), len(other))
    differ = (one[:steps].argmax(-1) != other[:steps].argmax(-1)).nonzero()
    steps = int(differ[0]) + 1 if len(differ) else steps
    error = float((other[:steps] - one[:steps]).norm() / one[:steps].norm()) if steps else 0.0
    return "" if error <= max_error else f"its logits differ by {error:.1e}"
