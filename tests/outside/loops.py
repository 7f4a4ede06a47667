"""Drives a reference model plainly and packed, and compares its tokens and logits."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from node_by_node import running_node_by_node
from torch import Tensor

import kvcompile
from outside.plugin import BOUND, LOSSLESS, counts
from outside.reference_models import Reference
from outside.running import CRASHED, TestRun
from outside.verdict import Verdict, compare

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
    runs = []
    with contextlib.suppress(EOFError):
        while len(runs) < 2 and receiving.poll(TIMEOUT):
            runs.append(receiving.recv())
    process.kill()
    process.join()
    crashed = TestRun(reference.name, CRASHED, f"its process ended with {process.exitcode}")
    plain, packed = [*runs, crashed, crashed][:2]
    return compare(reference.name, f"its loop, {policy}", {plain.test: plain}, {packed.test: packed})


def _judge(reference: Reference, folder: Path, policy: str, sending: Any, log: Path | None) -> None:
    torch.set_num_threads(1)  # a fork has none of the threads of its parent, and would wait for them
    output = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for run in _runs(reference, folder, policy):
        sending.send(run)


def _runs(reference: Reference, folder: Path, policy: str) -> Iterator[TestRun]:
    """The plain run of a model, and its packed run."""
    backends: list[Any] = ["aot_eager", kvcompile.kvquant(policy=policy, on_unsupported="ignore")]
    results: list[tuple[Tensor, Tensor]] = []
    for backend in backends:
        torch._dynamo.reset()
        message = ""
        with running_node_by_node(operators=True), kvcompile.collect_reports() as report:
            try:
                results.append(reference.run(folder, partial(torch.compile, backend=backend)))
            except Exception as error:
                traceback.print_exc()
                message = f"{type(error).__name__}: {error}"
        if len(results) == len(backends):
            message = difference(*results, MAX_ERROR if policy == LOSSLESS else BOUND, policy == LOSSLESS)
        yield TestRun(reference.name, "failed" if message else "passed", message, **counts(report))


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
