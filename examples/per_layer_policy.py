"""A policy file that gives layers different formats, and the report on a model with four layers.

python examples/per_layer_policy.py
python examples/per_layer_policy.py --policy my_policy.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tiny_models import tiny_llama
from transformers import StaticCache

import kvcompile
from kvcompile.compat.transformers import with_cache

POLICY = Path(__file__).with_suffix(".yaml")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=POLICY, help="default: %(default)s")
    options = parser.parse_args(arguments)

    policy = kvcompile.Policy.from_file(options.policy)
    print(policy.to_yaml())
    model = tiny_llama(num_layers=4)
    cache = StaticCache(config=model.config, max_cache_len=128)
    token = torch.zeros(1, 1, dtype=torch.int64)
    print(kvcompile.explain(model, token, policy=policy, **with_cache(model, cache)))


if __name__ == "__main__":
    main()
