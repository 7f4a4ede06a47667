"""One rank of tests/hugging_face/test_tensor_parallel.py: a model that Transformers distributes, on packed caches.

``forked_ranks.py`` runs ``tensor_parallel_program.py CHECKPOINT OUTPUT.pt``; rank 0 writes the result of :func:`run`.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from node_by_node import running_node_by_node
from ranks import save_results
from tiny_llama import fresh_cache
from torch import Tensor
from transformers.distributed import DistributedConfig

import kvcompile

STEPS = (5, 1, 1)


@torch.no_grad()
def run(model: Any) -> dict[str, Any]:
    """Prefill and decode a prompt on packed caches; code is generated on GPUs.

    Returns:
        ``logits`` [1, tokens, vocab_size]; ``cache`` the keys and values of the first layer, dequantized; ``sites`` the
        refusals of all attention sites, None for a rewritten site.
    """
    # Static sizes, because DTensor's cache of shardings cannot hash a symbolic size.
    options = {"policy": "int8_per_token_head"}
    compiled = torch.compile(model, backend="kvquant", dynamic=False, options=options)
    cache = fresh_cache(model, "static")
    prompt = torch.randint(0, model.config.vocab_size, (1, sum(STEPS)), generator=torch.Generator().manual_seed(1))
    logits: list[Tensor] = []
    on_gpu = model.device.type == "cuda"
    with nullcontext() if on_gpu else running_node_by_node(operators=True), kvcompile.collect_reports() as report:
        for ids in prompt.to(model.device).split(STEPS, dim=1):
            logits.append(compiled(input_ids=ids, past_key_values=cache).logits.cpu())
    layer = cache.layers[0]
    assert isinstance(layer.keys, kvcompile.PackedTensor), "the cache of this rank is packed"
    assert isinstance(layer.values, kvcompile.PackedTensor), "the cache of this rank is packed"
    tokens = slice(sum(STEPS))
    return {
        "logits": torch.cat(logits, 1),
        "cache": [x.dequantize()[:, :, tokens].cpu() for x in (layer.keys, layer.values)],
        "sites": [site.reason for site in report.sites],
    }


def main(checkpoint: str, output: Path) -> None:
    config = DistributedConfig(tp_plan="auto", tp_size=int(os.environ["WORLD_SIZE"]))
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, distributed_config=config).eval()
    result = run(model)
    save_results(result, output)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
