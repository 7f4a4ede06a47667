"""One rank of tests/call/test_two_dimensions.py: four ranks, of which two divide the heads and two the tokens.

torchrun runs ``two_dimensions_program.py CHECKPOINT OUTPUT.pt``; rank 0 writes the results of all ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from node_by_node import running_node_by_node
from ranks import save_results
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kvcompile
from kvcompile.passes.refusal import Reason, Refusal

HEADS, KV_HEADS, WIDTH, HIDDEN, CAPACITY = 4, 2, 16, 32, 150
STEPS = (130, 1, 1)
"""New tokens of each step; the prompt fills two blocks, and begins a third."""


class HandWritten(nn.Module):
    """Attention with a cache of the heads that this rank has."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (HEADS, KV_HEADS, KV_HEADS)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, heads * WIDTH, bias=False) for heads in sizes)
        self.o = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        self.keys, self.values = (torch.zeros(1, kv_heads, CAPACITY, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (self.q, self.k, self.v))
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        visible = torch.arange(CAPACITY) <= positions[:, None]
        out = F.scaled_dot_product_attention(q, self.keys, self.values, visible, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


RANK_THAT_REFUSES = 3

PLAN = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "o": RowwiseParallel}


@torch.no_grad()
def hand_written(step: Any) -> list[Tensor]:
    x = torch.randn(1, sum(STEPS), HIDDEN, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(sum(STEPS))
    return [step(*new) for new in zip(x.split(STEPS, 1), positions.split(STEPS), strict=True)]


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
        own = parallelize_module(HandWritten(KV_HEADS // 2), mesh["tp"], {name: kind() for name, kind in PLAN.items()})
        result["hand-written"] = hand_written(torch.compile(own, backend=backend, dynamic=False))
        result["hand-written cache"] = type(own.keys).__name__, own.keys.local.shape
        model = transformers.LlamaForCausalLM.from_pretrained(checkpoint).eval()
        attention = {f"model.layers.*.self_attn.{name}_proj": kind() for name, kind in PLAN.items()}
        model = parallelize_module(model, mesh["tp"], attention)
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
