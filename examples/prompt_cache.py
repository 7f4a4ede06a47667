"""Save the packed cache of a long prompt, load it later, and continue without reading the prompt again.

python examples/prompt_cache.py
python examples/prompt_cache.py --policy int4_per_token_head --file prompt.safetensors
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path

import torch
from tiny_models import VOCAB_SIZE, tiny_llama
from transformers import StaticCache

import kvcompile
from kvcompile.compat.transformers import with_cache

PROMPT_TOKENS, MAX_TOKENS = 400, 448


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="int8_per_token_head", help="preset or file")
    parser.add_argument("--file", type=Path, help="where to save the cache; default: a temporary file")
    options = parser.parse_args(arguments)
    prompt, question = torch.randint(0, VOCAB_SIZE, (1, PROMPT_TOKENS + 1)).split((PROMPT_TOKENS, 1), dim=1)

    model = tiny_llama()
    cache = StaticCache(config=model.config, max_cache_len=MAX_TOKENS)
    model(prompt, **with_cache(model, cache))  # eager, on a plain cache
    plain_bytes = kvcompile.cache_nbytes(cache)
    compiled = torch.compile(model, backend="kvquant", options={"policy": options.policy})
    compiled(question, **with_cache(model, cache))  # packs the cache
    print(f"cache of all layers: {plain_bytes} bytes in float32 -> {kvcompile.cache_nbytes(cache)} bytes packed")

    with tempfile.TemporaryDirectory() as folder:
        file = options.file or Path(folder, "prompt.safetensors")
        kvcompile.save_cache(cache, file, model=model)
        print(f"saved in {file.stat().st_size} bytes")
        loaded = kvcompile.load_cache(file, model=model)
    expected = compiled(question, **with_cache(model, copy.deepcopy(cache))).logits
    logits = compiled(question, **with_cache(model, loaded)).logits
    print(f"continues with the same logits: {torch.equal(logits, expected)}")


if __name__ == "__main__":
    main()
