"""One rank of tests/call/test_context_parallel.py: attention on a cache whose tokens the ranks hold together.

``forked_ranks.py`` runs ``context_parallel_program.py DEVICE OUTPUT.pt``; rank 0 writes the results of all ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from node_by_node import running_node_by_node
from ranks import save_results
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import kvcompile
from kvcompile.parallel.context_parallel import shard_of

BATCH, HEADS, KV_HEADS, WIDTH, TOKENS = 2, 4, 2, 32, 200
STEPS = (70, 58, *[1] * 12, 58)
"""New tokens of each step. The first is a prompt that ends within the second block; the last fills the cache. A decode
step begins the third block. Three sizes make three graphs."""

FEW_SIZES = (186, *[1] * 12)
"""The same with a prompt that ends within the third block, for two graphs: no chunk is written to a packed cache."""


class Model(torch.nn.Module):
    """Attention with a cache of fixed size, a mask, and sinks."""

    def __init__(self, device: str) -> None:
        super().__init__()
        shape = (BATCH, KV_HEADS, TOKENS, WIDTH)
        self.keys, self.values = (torch.zeros(shape, device=device) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        visible = torch.arange(TOKENS, device=q.device) <= positions[:, None]
        return F.scaled_dot_product_attention(q, self.keys, self.values, visible, enable_gqa=True)


class WithoutMask(Model):
    """Attends to the whole cache, without a mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        self.keys[:, :, positions] = k
        self.values[:, :, positions] = v
        return F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)


class FloatMask(Model):
    """Adds biases to the scores, and hides later tokens with -inf."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        distance = positions[:, None] - torch.arange(TOKENS, device=q.device)
        bias = torch.where(distance >= 0, -0.1 * distance, -torch.inf)
        return F.scaled_dot_product_attention(q, self.keys, self.values, bias, enable_gqa=True)


class PerSequence(Model):
    """Each sequence writes at different positions; the second sequence is two tokens ahead."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        own = torch.stack([positions, positions + 2])
        sequence = torch.arange(BATCH, device=q.device)[:, None]
        self.keys[sequence, :, own] = k.transpose(1, 2)
        self.values[sequence, :, own] = v.transpose(1, 2)
        visible = torch.arange(TOKENS, device=q.device) <= own[:, None, :, None]
        return F.scaled_dot_product_attention(q, self.keys, self.values, visible, enable_gqa=True)


MODELS: dict[str, type[Model]] = {
    "mask": Model, "no mask": WithoutMask, "float mask": FloatMask, "per sequence": PerSequence,
}  # fmt: skip

CASES = [(name, "float32") for name in MODELS] + [("mask", "int4_per_token_head")]


def steps_of(name: str, policy: str, num_ranks: int) -> tuple[int, ...]:
    """The steps of a case. Two ranks write chunks at common positions, and at positions per sequence."""
    return STEPS if num_ranks > 2 or (policy == "float32" and name in ("mask", "per sequence")) else FEW_SIZES


@torch.no_grad()
def outputs(model: Model, step: Any, steps: tuple[int, ...] = STEPS) -> list[Tensor]:
    """The outputs of all ``steps`` on random queries, keys and values, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    device, begin, results = model.keys.device, 0, []
    for count in steps:
        shapes = ((BATCH, heads, count, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
        new = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        results.append(step(*new, torch.arange(begin, begin + count, device=device)).cpu())
        begin += count
    return results


@contextmanager
def _generating_code(device: str, operators: bool = False) -> Iterator[None]:
    """Code is generated on GPUs; elsewhere graphs run node by node."""
    if device == "cuda":
        yield
    else:
        with running_node_by_node(operators):
            yield


def run(name: str, policy: str, device: str, ranks: Any) -> dict[str, Any]:
    """A model's outputs, its cache, and why its attention was refused."""
    torch._dynamo.reset()
    model = MODELS[name](device)
    backend = kvcompile.kvquant(policy=policy, context_parallel=ranks, on_unsupported="error")
    operators = (name, policy) != CASES[0]  # the plain PyTorch of attention is traced in one case
    with _generating_code(device, operators), kvcompile.collect_reports() as report:
        steps = steps_of(name, policy, dist.get_world_size())
        results = outputs(model, torch.compile(model, backend=backend, dynamic=False), steps)
    return {
        "outputs": results,
        "keys": model.keys.dequantize().cpu(),
        "kind": type(model.keys).__name__,
        "bytes": kvcompile.cache_nbytes(model.keys),
        "refusals": [site.reason for site in report.sites if not site.rewritten],
    }


@torch.no_grad()
def eager(device: str, ranks: Any) -> dict[str, Any]:
    """Reads and writes of a shard in eager code, beside the same on a plain cache."""
    layout = kvcompile.Policy.load("float32").formats_for("", 0, 1).layout("key", WIDTH, torch.float32)
    plain = torch.randn(BATCH, KV_HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
    cache = kvcompile.PackedShard.from_dense(plain, layout, shard_of(ranks))
    copy, pairs = cache.clone(), {"dequantize": (cache.dequantize(), plain.clone())}
    for tensor in (plain, cache):
        tensor[:, :, 60:70] = 1.0
        tensor[0].mul_(2)
    pairs["written"] = cache.dequantize(), plain.clone()
    pairs["slice"] = cache[:, :, 63:129].sum(2), plain[:, :, 63:129].sum(2)
    pairs["reset"] = cache.zero_().dequantize(), torch.zeros_like(plain)
    return {name: [x.cpu() for x in pair] for name, pair in pairs.items()} | {"copy": [copy.dequantize().cpu()]}


@torch.no_grad()
def refused(device: str, ranks: Any) -> list[str | None]:
    """The reasons for a format that keeps recent tokens, and for a growing cache."""
    reasons = []
    for policy, steps in (("int4", fixed_step), ("int8_per_token_head", growing_step)):
        torch._dynamo.reset()
        step = torch.compile(steps, backend=kvcompile.kvquant(policy=policy, context_parallel=ranks), dynamic=False)
        keys, values = (torch.zeros(1, 2, 64, WIDTH, device=device) for _ in range(2))
        with _generating_code(device), kvcompile.collect_reports() as report:
            step(torch.randn(1, 2, 1, WIDTH, device=device), keys, values, torch.tensor([3], device=device))
        reasons += [site.reason for site in report.sites]
    return reasons


def fixed_step(x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    keys.index_copy_(2, position, x)
    values.index_copy_(2, position, x)
    return F.scaled_dot_product_attention(x, keys, values)


def growing_step(x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = torch.cat([keys, x], 2), torch.cat([values, x], 2)
    return F.scaled_dot_product_attention(x, keys, values), keys, values


def disagreement(device: str, ranks: Any) -> str:
    """The error of ranks with different policies."""
    torch._dynamo.reset()
    model = Model(device)
    policy = "int8_per_token_head" if dist.get_rank() == 0 else "int4"  # int4 keeps tokens in full precision
    step = torch.compile(model, backend=kvcompile.kvquant(policy=policy, context_parallel=ranks), dynamic=False)
    try:
        with _generating_code(device):
            outputs(model, step)
    except Exception as error:
        return str(error)
    return ""


def main(device: str, output: Path) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    result: dict[str, Any] = {f"{name}, {policy}": run(name, policy, device, mesh["cp"]) for name, policy in CASES}
    result["eager"] = eager(device, mesh["cp"])
    result["refused"] = refused(device, mesh["cp"])
    result["disagreement"] = disagreement(device, mesh["cp"])
    save_results(result, output)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
