"""One rank of tests/call/test_two_dimensions.py: four ranks, two for the heads times two for the tokens.

``forked_ranks.py`` runs ``two_dimensions_program.py CHECKPOINT OUTPUT.pt``; rank 0 writes the results of all ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from cached_attention import CachedAttention, outputs
from node_by_node import running_node_by_node
from ranks import save_results
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kvcompile
from kvcompile.passes.refusal import Reason, Refusal

KV_HEADS, CAPACITY = 2, 150
STEPS = (130, 1, 1)
"""New tokens of each step; the prompt fills two blocks, and begins a third."""


def hand_written(own_heads: int) -> CachedAttention:
    """Attention with a cache of the heads that a rank has."""
    return CachedAttention(KV_HEADS, own_heads, CAPACITY)


RANK_THAT_REFUSES = 3

PLAN = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "o": RowwiseParallel}
MLP_PLAN = {"gate": ColwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}


@torch.no_grad()
def llama(step: Any, cache: Any) -> list[Tensor]:
    ids = torch.randint(0, 90, (1, sum(STEPS)), generator=torch.Generator().manual_seed(1))
    return [step(input_ids=new, past_key_values=cache).logits for new in ids.split(STEPS, 1)]


def main(checkpoint: str, output: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    backend = kvcompile.kvquant(policy="float32", context_parallel=mesh["cp"], on_unsupported="error")
    result: dict[str, Any] = {}
    with running_node_by_node(), kvcompile.collect_reports() as report:
        own = parallelize_module(hand_written(KV_HEADS // 2), mesh["tp"], {name: kind() for name, kind in PLAN.items()})
        result["hand-written"] = outputs(torch.compile(own, backend=backend, dynamic=False), STEPS)
        result["hand-written cache"] = type(own.keys).__name__, own.keys.local.shape
        model = transformers.LlamaForCausalLM.from_pretrained(checkpoint).eval()
        attention = {f"model.layers.*.self_attn.{name}_proj": kind() for name, kind in PLAN.items()}
        model = parallelize_module(model, mesh["tp"], attention)
        mlp = {f"model.layers.*.mlp.{name}_proj": kind() for name, kind in MLP_PLAN.items()}
        model = parallelize_module(model, mesh["cp"], mlp)
        cache = kvcompile.static_cache(model, 1, CAPACITY, "float32", context_parallel=mesh["cp"])
        result["Llama"] = llama(torch.compile(model, backend=backend, dynamic=False), cache)
        result["Llama cache"] = type(cache.layers[0].keys).__name__, cache.layers[0].keys.local.shape
    result["refusals"] = [site.reason for site in report.sites if site.reason]
    ranks = {"context_parallel": mesh["cp"], "tensor_parallel": mesh["tp"]}
    result["report"] = kvcompile.report_of_ranks(report, **ranks)
    result["report of tensor-parallel ranks"] = kvcompile.report_of_ranks(report, tensor_parallel=mesh["tp"])
    result["report of context-parallel ranks"] = kvcompile.report_of_ranks(report, context_parallel=mesh["cp"])
    if dist.get_rank() == RANK_THAT_REFUSES:
        report.sites[0].refuse(Refusal(Reason.training))
    try:
        kvcompile.report_of_ranks(report, **ranks)
    except kvcompile.KVCompileError as error:
        result["differs"] = str(error)
    save_results(result, output)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
