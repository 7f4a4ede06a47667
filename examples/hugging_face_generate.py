"""``generate()`` of Hugging Face on packed caches: a static cache, and the default cache, which grows.

python examples/hugging_face_generate.py
python examples/hugging_face_generate.py --policy turboquant_4bit_nc
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny_models import VOCAB_SIZE, tiny_llama
from transformers import CompileConfig

import kvcompile
from kvcompile.compat.transformers import cache_of


def with_static_cache(prompt: torch.Tensor, policy: str, **arguments: Any) -> Any:
    """A static cache: generate() fills the cache eagerly and compiles the decode step, which packs the cache."""
    config = CompileConfig(backend="kvquant", mode=None, options={"policy": policy})
    config._compile_all_devices = True  # by default, Transformers compiles on accelerators only
    return tiny_llama().generate(prompt, cache_implementation="static", compile_config=config, **arguments)


def with_growing_cache(prompt: torch.Tensor, policy: str, **arguments: Any) -> Any:
    """The default cache grows by concatenation. With a compiled model, prefill and decoding both run packed."""
    model = tiny_llama()
    model.compile(backend="kvquant", options={"policy": policy})
    return model.generate(prompt, **arguments)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="int8_per_token_head", help="preset or file")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    prompt = torch.randint(0, VOCAB_SIZE, (1, 64), generator=torch.Generator().manual_seed(0))
    sampling = {"max_new_tokens": options.new_tokens, "do_sample": False, "return_dict_in_generate": True}

    plain = tiny_llama().generate(prompt, **sampling)
    for name, generate in (("static", with_static_cache), ("growing", with_growing_cache)):
        torch._dynamo.reset()
        with kvcompile.collect_reports() as report:
            result = generate(prompt, options.policy, **sampling)
        same = (result.sequences == plain.sequences)[:, prompt.shape[1] :].float().mean()
        before, after = (kvcompile.cache_nbytes(cache_of(output)) for output in (plain, result))
        print(f"--- {name} cache ---\n{report}")
        print(f"cache of all layers: {after} bytes; plain and growing, in float32: {before} bytes")
        print(f"{100 * same:.0f} % of the tokens are the same\n")


if __name__ == "__main__":
    main()
