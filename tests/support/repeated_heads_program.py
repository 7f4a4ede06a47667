"""One rank of tests/call/test_repeated_heads_on_ranks.py: more ranks than KV heads, so all have the same KV heads.

``forked_ranks.py`` runs ``repeated_heads_program.py OUTPUT.pt``; rank 0 writes the results of all ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cached_attention import CachedAttention, outputs
from node_by_node import running_node_by_node
from ranks import save_results
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kvcompile

CAPACITY = 80
STEPS = (66, 1, 1)
LENGTHS = (3, 4, 5, 1)
"""New tokens of each step with symbolic sizes."""


def one_key_head() -> CachedAttention:
    """Several query heads and one KV head: a plan divides the query heads, and every rank computes the KV head."""
    return CachedAttention(kv_heads=1, own_heads=1, capacity=CAPACITY)


PLAN = {"q": ColwiseParallel, "o": RowwiseParallel}


def run(mesh: Any, lengths: tuple[int, ...], dynamic: bool) -> dict[str, Any]:
    """The outputs of a distributed model, or its error; its cache, and the refusals."""
    torch._dynamo.reset()
    model = parallelize_module(one_key_head(), mesh, {name: kind() for name, kind in PLAN.items()})
    step = torch.compile(model, backend=kvcompile.kvquant(policy="float32"), dynamic=dynamic)
    result: dict[str, Any] = {"error": None}
    with running_node_by_node(), kvcompile.collect_reports() as report:
        try:
            result["outputs"] = outputs(step, lengths)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
    result["cache"] = type(model.keys).__name__, tuple(model.keys.shape)
    result["keys"] = model.keys.dequantize() if isinstance(model.keys, kvcompile.PackedTensor) else model.keys
    result["refusals"] = [site.reason for site in report.sites if site.reason]
    return result


def main(output: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    result = {"fixed sizes": run(mesh, STEPS, dynamic=False), "symbolic sizes": run(mesh, LENGTHS, dynamic=True)}
    save_results(result, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
