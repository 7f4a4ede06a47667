"""One rank of tests/call/test_failing_ranks.py: in each case the last rank fails or differs; each rank notes its error.

``failing_rank_program.py CASES OUTPUT.pt`` runs the cases whose names stand in CASES, with commas. In the case
``model code`` the last rank ends with an error. Each rank writes its own results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from context_parallel_program import WIDTH, Model, outputs
from node_by_node import running_node_by_node
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import kvcompile
from kvcompile.compilation import graph_compiler, rewriter
from kvcompile.parallel.agreement import together
from kvcompile.parallel.context_parallel import shard_of

SECONDS = 10
"""The timeout of the process group."""


def fail(*args: Any, **kwargs: Any) -> None:
    raise ValueError("no more paper")


def is_faulty() -> bool:
    """Whether this is the rank that fails: the last one."""
    return dist.get_rank() == dist.get_world_size() - 1


@contextmanager
def failing(module: ModuleType, name: str) -> Iterator[None]:
    """A function of the backend fails inside the ``with`` block."""
    with patch.object(module, name, fail):
        yield


class OwnError(Model):
    """Fails on the last rank before its attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        if is_faulty():
            fail()
        return super().forward(q, k, v, positions)


def steps(ranks: Any, model: Model | None = None, policy: str = "int8_per_token_head") -> None:
    model = model or Model("cpu")
    step = kvcompile.kvquant(policy=policy, context_parallel=ranks, on_unsupported="ignore")
    with running_node_by_node(operators=True):
        outputs(model, torch.compile(model, backend=step, dynamic=False))


def in_backend(module: ModuleType, name: str) -> Callable[[Any], None]:
    def case(ranks: Any) -> None:
        if not is_faulty():
            return steps(ranks)
        with failing(module, name):
            return steps(ranks)

    return case


def adoption(ranks: Any) -> None:
    """A view of the cache is alive on one rank, so the cache cannot be packed there."""
    model = Model("cpu")
    view = model.keys[0] if is_faulty() else None
    steps(ranks, model)
    assert view is None


def decisions(ranks: Any) -> None:
    steps(ranks, policy="int4" if is_faulty() else "int8_per_token_head")  # int4 keeps tokens in full precision


def training(ranks: Any) -> None:
    """One rank records gradients, so it leaves its attention to plain Inductor."""
    step = torch.compile(Model("cpu"), backend=kvcompile.kvquant(context_parallel=ranks), dynamic=False)
    q, k, v = (torch.randn(2, heads, 1, WIDTH) for heads in (4, 2, 2))
    with running_node_by_node(operators=True), torch.set_grad_enabled(is_faulty()):
        step(q.requires_grad_(is_faulty()), k, v, torch.tensor([0]))


def late(ranks: Any) -> None:
    """One rank takes part only when the others have given up."""
    shard = shard_of(ranks)
    assert shard is not None
    if is_faulty():
        time.sleep(SECONDS + 5)
    together(shard, lambda: None)


def model_code(ranks: Any) -> None:
    """The model itself fails on one rank, while Dynamo traces it, and the program of that rank ends."""
    steps(ranks, OwnError("cpu"))


CASES: dict[str, Callable[[Any], None]] = {
    "before packing": in_backend(graph_compiler, "mark_attention"),
    "in packing": in_backend(rewriter, "run"),
    "in code": in_backend(graph_compiler, "PackedCode"),
    "adoption": adoption,
    "decisions": decisions,
    "training": training,
    "late": late,
    "model code": model_code,
}


def main(names: str, output: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    results = {}
    for name in names.split(","):
        torch._dynamo.reset()
        begin, message = time.monotonic(), ""
        try:
            CASES[name](mesh["cp"])
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if name == "model code" and is_faulty():
                raise
        results[name] = message, time.monotonic() - begin
    torch.save(results, output.with_suffix(f".{dist.get_rank()}"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
