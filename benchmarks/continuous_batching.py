"""Continuous batching of Transformers on plain and on packed pages: how many pages fit into memory, and tokens/s.

    python benchmarks/continuous_batching.py [--policies plain int8_per_token_head ...] [--requests 32] [--prompt 512]
                                             [--new-tokens 64] [--layers 4] [--memory 1GiB] [--small]

On a GPU the model has the shape of Llama 3 8B, with few layers and random weights in bfloat16. ``--small``, the default
on a CPU, selects a small model in float32. Every policy serves the same prompts with the same memory for pages, once to
warm up and once timed. The policy ``plain`` stands for the pages of Transformers.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import transformers
from transformers.generation import ContinuousBatchingConfig

import kvcompile
from kvcompile.planning.units import parse_size

PLAIN = "plain"
POLICIES = [PLAIN, "int8_per_token_head", "int4_per_token_head"]
PAGE_SIZE = 256
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}


def model_of(small: bool, layers: int, device: str) -> Any:
    """A Llama with random weights."""
    torch.manual_seed(0)
    sizes = SMALL if small else LLAMA_3_8B
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=1 << 16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    return model.eval().to(torch.float32 if small else torch.bfloat16)


def plain_block_bytes(model: Any) -> int:
    """Bytes of a plain block: a page of every layer."""
    config, itemsize = model.config, model.dtype.itemsize
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize * PAGE_SIZE


def measure(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    model = model_of(args.small, args.layers, args.device)
    if policy != PLAIN:
        kvcompile.compile(model, policy=policy, on_unsupported="error")
    prompts = torch.randint(model.config.vocab_size, (args.requests, args.prompt)).tolist()
    generation = transformers.GenerationConfig(max_new_tokens=args.new_tokens, eos_token_id=-1, do_sample=False)
    num_blocks = max(1, args.memory // plain_block_bytes(model))
    batching = ContinuousBatchingConfig(page_size=PAGE_SIZE, num_blocks=num_blocks, max_batch_tokens=args.batch_tokens)
    with model.continuous_batching_context_manager(generation, continuous_batching_config=batching) as manager:
        cache = manager.batch_processor.cache
        begin = seconds = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            manager.add_requests(prompts, max_new_tokens=args.new_tokens)
            results = [manager.get_result(timeout=600) for _ in prompts]
            if any(result is None or result.error is not None for result in results):
                raise RuntimeError(f"{policy}: not all requests were served")
            seconds = time.perf_counter() - begin
        (allocator,) = cache.cache_allocators.values()
        blocks = allocator.num_blocks
        nbytes = cache.num_sectors * cache.bytes_per_sector
    return {
        "policy": policy,
        "blocks": blocks,
        "blocks_per_gib": blocks * 2**30 / nbytes,
        "tokens_per_second": args.requests * args.new_tokens / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory", type=lambda text: parse_size(text, "--memory"), default=1 << 30)
    parser.add_argument("--small", action="store_true", default=not torch.cuda.is_available())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    for policy in args.policies:
        print(json.dumps(measure(policy, args)), flush=True)


if __name__ == "__main__":
    main()
