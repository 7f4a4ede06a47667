"""An encoder-decoder model with two packed caches: the decoder's own cache, and the cache of the encoder's output.

    python examples/encoder_decoder.py

The caches are static; the default, growing caches work as well. In every step, the decoder writes its own cache and
reads the encoder's cache.
"""

from __future__ import annotations

import argparse

import torch
from tiny_models import VOCAB_SIZE, tiny_bart

import kvcompile
from kvcompile.compat.transformers import cache_of


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="int8_per_token_head", help="preset or file")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    source = torch.randint(3, VOCAB_SIZE, (1, 64), generator=torch.Generator().manual_seed(0))
    sampling = {"max_new_tokens": options.new_tokens, "do_sample": False, "return_dict_in_generate": True}

    plain = tiny_bart().generate(source, cache_implementation="static", disable_compile=True, **sampling)
    model = tiny_bart()
    model.compile(backend="kvquant", options={"policy": options.policy})
    with kvcompile.collect_reports() as report:
        result = model.generate(source, cache_implementation="static", disable_compile=True, **sampling)

    print(report)
    for part in ("self_attention_cache", "cross_attention_cache"):
        before, after = (kvcompile.cache_nbytes(getattr(cache_of(output), part)) for output in (plain, result))
        print(f"{part}, all layers: {before} bytes in float32 -> {after} bytes packed")
    print(f"{100 * (result.sequences == plain.sequences).float().mean():.0f} % of the tokens are the same")


if __name__ == "__main__":
    main()
