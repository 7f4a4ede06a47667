"""A decode step and a prompt on one GPU and on several: tensor parallel, context parallel and both on the same ranks.

    torchrun --nproc-per-node 2 benchmarks/parallel.py [--tensor-shape 8,32/8,128,32768] [--layers 16] ...
    python benchmarks/parallel.py --help

Ranks run a model as wide as Llama 3 8B with random weights in bfloat16. First, rank 0 runs it alone while the others
wait. The baseline of a row is the same step on one rank.

- tensor parallel: PyTorch distributes weights and KV heads (``parallelize_module``). Caches are full of random values.
- prompt: tensor parallel, but a step reads a whole prompt into an empty cache, and CUDA graphs are off.
- context parallel: every rank has all weights and a part of the tokens (``context_parallel=``). Their
  shards are full of random values.
- helix: context parallel, and PyTorch distributes the weights of MLPs over the same ranks (Helix parallelism,
  arXiv 2507.07120).

The logits of the first step are compared with the logits of one rank on the same cache. All ranks begin a repeat at the
same time. The slowest rank determines the time of the repeat. The section "Faster steps" of docs/parallel.md describes
the settings: CUDA graphs, merged projections, NCCL_GRAPH_MIXING_SUPPORT=0 and no guards on modules.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from llama import config, packed_layers, random_model
from recording import Chart, Recorder, argument, parse_arguments
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kvcompile
from kvcompile.benching.measuring import Timing
from kvcompile.benching.workloads import DEVICE, DTYPE, Shape, check, relative_error
from kvcompile.compat.transformers import with_cache
from kvcompile.policy.policy import Policy

MAX_ERROR = 5e-2
"""The largest allowed relative error of logits: ranks sum in another order, and every layer rounds to bfloat16."""

FILLED_AT_ONCE = 240 * 64
"""Tokens that are drawn at a time: 240 blocks of 64, which 1 to 6, 8, 10, 12, 15 or 16 ranks divide evenly."""

STEPS = 20
"""Steps of a repeat."""

MLP = {"mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel, "mlp.down_proj": RowwiseParallel}
ATTENTION = {f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel}
"""How linear layers are split: by columns, or by rows, so that their outputs are summed over the ranks."""

SPLIT_LAYERS = {
    "tensor parallel": ATTENTION | MLP,
    "prompt": ATTENTION | MLP,
    "context parallel": {},
    "helix": MLP,
}
"""The linear layers that every case splits."""

CASES = [case.split()[0] for case in SPLIT_LAYERS]

MODES: dict[str, dict[str, Any]] = {"default": {}, "reduce-overhead": {"triton.cudagraphs": True}}

UNCHECKED_MODULES = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
"""The option of ``torch.compile`` that drops guards on modules and parameters; nothing here changes them."""


@dataclass(frozen=True)
class Ranks:
    """The processes of this run, or the first process alone.

    Attributes:
        rank: this process.
        size: the number of processes that run the model.
        mesh: the mesh of these processes; None for a single process.
    """

    rank: int
    size: int
    mesh: Any = None

    def slowest(self, seconds: list[float]) -> list[float]:
        """The element-wise maximum of ``seconds`` over all ranks."""
        if self.mesh is None:
            return seconds
        largest = torch.tensor(seconds, device=DEVICE)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def begin_together(self) -> None:
        synchronize()  # the barrier may not overlap a CUDA graph with collectives
        if self.mesh is not None:
            dist.barrier()
        synchronize()


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def distributed(model: Any, case: str, ranks: Ranks) -> Any:
    """The model with this rank's part of the weights that ``case`` splits; embeddings stay whole."""
    layers = SPLIT_LAYERS[case]
    if ranks.mesh is not None and layers:
        parallelize_module(model.model, ranks.mesh, {f"layers.*.{name}": style() for name, style in layers.items()})
    return model


def fill(cache: Any, ranks: Ranks) -> None:
    """Fill a cache with this rank's part of random tokens that do not depend on the number of ranks."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    for layer in cache.layers:
        for whole in (layer.keys, layer.values):
            is_shard = isinstance(whole, kvcompile.PackedShard)
            batch, heads, num_tokens, head_dim = whole.shape
            all_heads = heads * (1 if is_shard else ranks.size)
            for first in range(0, num_tokens, FILLED_AT_ONCE):
                count = min(FILLED_AT_ONCE, num_tokens - first)
                tokens = torch.randn(batch, all_heads, count, head_dim, generator=generator, device=DEVICE, dtype=DTYPE)
                if is_shard:
                    tokens, first = whole.shard.select(tokens, 2), first // ranks.size
                    whole.local[:, :, first : first + tokens.shape[2]] = tokens
                else:
                    own = tokens.narrow(1, ranks.rank * heads, heads) if ranks.size > 1 else tokens
                    whole[:, :, first : first + count] = own


def rewind(cache: Any, position: int | None = None) -> None:
    """Let the next step write at ``position``; by default, so near the end that a repeat of steps fits."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(max(0, layer.max_cache_len - 2 * STEPS) if position is None else position)


def time_steps(
    step: Callable[[], object], prepare: Callable[[], object], num_steps: int, ranks: Ranks, repeats: int
) -> Timing:
    """The time of a step, from repeats of ``num_steps`` steps. ``prepare`` runs before the clock of each repeat."""
    seconds = []
    for _ in range(repeats + 1):  # the first repeat is not timed
        prepare()
        ranks.begin_together()
        begin = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize()
        seconds.append((time.perf_counter() - begin) / num_steps)
    return Timing.of(ranks.slowest(seconds[1:]), "wall clock")


@dataclass(frozen=True)
class Job:
    """A step that is measured on one rank and on all ranks.

    Attributes:
        case: a key of SPLIT_LAYERS.
        shape: its caches.
        policy: the policy of kvcompile; None for plain ``torch.compile``.
        mode: a key of MODES.
    """

    case: str
    shape: Shape
    policy: str | None
    mode: str

    @property
    def splits_tokens(self) -> bool:
        return self.case in ("context parallel", "helix")

    @property
    def reads_prompt(self) -> bool:
        return self.case == "prompt"

    def compile(self, model: Any, ranks: Ranks) -> Any:
        if self.policy is None:
            return torch.compile(model, dynamic=False, options=MODES[self.mode] | UNCHECKED_MODULES)
        split = ranks.mesh if self.splits_tokens else None
        backend = kvcompile.kvquant(
            policy=self.policy,
            context_parallel=split,
            on_unsupported="error",
            options=MODES[self.mode],
            merge_projections=True,
        )
        return torch.compile(model, dynamic=False, backend=backend, options=dict(UNCHECKED_MODULES))

    def cache(self, model: Any, ranks: Ranks) -> Any:
        """An empty cache for this rank, packed from the start if there is a policy."""
        shape, policy = self.shape, self.policy
        if self.splits_tokens:
            return kvcompile.static_cache(model, shape.batch, shape.context, policy, ranks.mesh)
        cache = transformers.StaticCache(config=model.config, max_cache_len=shape.context)
        heads = shape.num_kv_heads // ranks.size
        cache.early_initialization(0 if policy else shape.batch, heads, shape.head_dim, DTYPE, DEVICE)
        for index, layer in enumerate(cache.layers if policy else []):
            formats = Policy.load(policy).formats_for("", index, len(cache.layers))
            assert formats is not None, "the policy packs every layer"
            size = (shape.batch, heads, shape.context, shape.head_dim)
            for name, role in (("keys", "key"), ("values", "value")):
                layout = formats.layout(role, shape.head_dim, DTYPE)
                setattr(layer, name, kvcompile.PackedTensor.zeros(size, DTYPE, layout, device=DEVICE))
        return cache


@dataclass(frozen=True)
class Measured:
    """The results of a job on some ranks: the logits of its first step, its time, and its cache."""

    logits: Tensor
    timing: Timing
    cache_bytes: int
    packed_layers: int


def measure(job: Job, ranks: Ranks, args: argparse.Namespace) -> Measured:
    torch._dynamo.reset()
    gc.collect()
    model = random_model(config(job.shape, args.layers, args.vocab_size), DTYPE, DEVICE)
    model = distributed(model, job.case, ranks)
    compiled = job.compile(model, ranks)
    cache = job.cache(model, ranks)
    if not job.reads_prompt:
        fill(cache, ranks)
    rewind(cache, 0 if job.reads_prompt else None)
    q_len = job.shape.context if job.reads_prompt else 1
    ids = torch.arange(job.shape.batch * q_len, device=DEVICE).view(-1, q_len) % args.vocab_size

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(input_ids=ids, **with_cache(model, cache), logits_to_keep=1).logits

    def begin_near_the_end() -> None:
        rewind(cache)
        step()

    logits = step().clone()
    if job.reads_prompt:
        timing = time_steps(step, lambda: rewind(cache, 0), 1, ranks, args.repeats)
    else:
        for _ in range(5):  # CUDA graphs are recorded
            step()
        timing = time_steps(step, begin_near_the_end, STEPS, ranks, args.repeats)
    return Measured(logits, timing, kvcompile.cache_nbytes(cache), _packed_layers(cache))


def _packed_layers(cache: Any) -> int:
    shards = sum(isinstance(layer.keys, kvcompile.PackedShard) for layer in cache.layers)
    return shards or packed_layers(cache)


def run(job: Job, ranks: Ranks, recorder: Recorder | None, args: argparse.Namespace) -> None:
    """Measure a job on one rank, then on all, and record two rows on the first rank."""
    alone = measure(job, Ranks(0, 1), args) if ranks.rank == 0 else None
    dist.barrier()
    together = measure(job, ranks, args)
    if recorder is None or alone is None:
        return
    for size, result in ((1, alone), (ranks.size, together)):
        named = {"case": job.case, "shape": str(job.shape), "format": job.policy or "plain", "mode": job.mode}
        with recorder.row(**named, ranks=size) as row:
            baseline = ("one rank", alone.timing) if size > 1 else None
            row |= recorder.timed(result.timing, None, baseline)
            row |= {"packed_layers": result.packed_layers, "cache_megabytes": result.cache_bytes / 1e6}
            if size > 1:
                row["relative_error"] = _checked_error(alone, together, job)


def _checked_error(alone: Measured, together: Measured, job: Job) -> float:
    error = relative_error(together.logits, alone.logits)
    return check(error, f"{job.case}, {job.policy or 'plain'}", MAX_ERROR)


def jobs(args: argparse.Namespace) -> list[Job]:
    result = []
    for mode in args.modes:
        result += [
            Job("tensor parallel", args.tensor_shape, args.policy, mode),
            Job("context parallel", args.context_shape, args.policy, mode),
            Job("helix", args.context_shape, args.policy, mode),
            Job("tensor parallel", args.tensor_shape, None, mode),
        ]
    result += [Job("prompt", args.prompt_shape, policy, "default") for policy in (args.policy, None)]
    return [job for job in result if job.case.split()[0] in args.cases]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    shape = argument(Shape.parse)
    parser.add_argument("--tensor-shape", type=shape, default="8,32/8,128,32768", help="default: %(default)s")
    parser.add_argument("--prompt-shape", type=shape, default="2,32/8,128,8192", help="default: %(default)s")
    parser.add_argument("--context-shape", type=shape, default="1,32/8,128,1048576", help="default: %(default)s")
    parser.add_argument("--policy", default="int4_per_token_head", help="preset or file (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["reduce-overhead"], help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats, at least 2 (default: %(default)s)")
    args = parse_arguments(parser, needs_cuda=False)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("it needs two ranks or more: torchrun --nproc-per-node 2 benchmarks/parallel.py")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    mesh = dist.init_device_mesh(DEVICE.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), mesh)
    chart = Chart("shape", ("case", "format", "ranks"), ("speedup",))
    recorder = Recorder(args, chart, DEVICE.type) if ranks.rank == 0 else None
    with torch.no_grad():
        for job in jobs(args):
            run(job, ranks, recorder, args)
    dist.barrier()
    torch._dynamo.reset()  # NCCL waits until no CUDA graph has its collectives
    gc.collect()
    dist.destroy_process_group()
    return recorder.finish() if recorder is not None else 0


if __name__ == "__main__":
    raise SystemExit(main())
