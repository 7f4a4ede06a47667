"""Inspect a compiled decode step: Dynamo's graph, the rewritten graph, the generated code, and the reasons of refusals.

    python examples/inspect_with_depyf.py                      # writes ./kvcompile_dump
    python examples/inspect_with_depyf.py --out DIR --policy int4_per_token_head

The model has two hand-written layers with random weights. The second layer also uses its cache for another purpose, so
this cache is not packed. The dump and the report give the reason.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvcompile

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_TOKENS = 64, 4, 2, 32, 128
SITE = "layers.0"


class CachedAttention(nn.Module):
    """Causal attention with grouped queries and its own cache."""

    def __init__(self, watched: bool) -> None:
        """``watched``: whether each step also computes the largest cached key."""
        super().__init__()
        self.watched = watched
        self.query = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM)
        self.key = nn.Linear(HIDDEN, NUM_KV_HEADS * HEAD_DIM)
        self.value = nn.Linear(HIDDEN, NUM_KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, NUM_KV_HEADS, MAX_TOKENS, HEAD_DIM))

    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
        """``x`` [1, 1, HIDDEN] at ``position`` [1] -> a tensor of the same shape, and the largest key if watched."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        visible = torch.arange(MAX_TOKENS, device=x.device) <= position
        attended = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=visible[None], enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2)), self.keys.abs().max() if self.watched else None


class Decoder(nn.Module):
    """Two layers of attention; the second also computes the largest cached key."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CachedAttention(watched=False), CachedAttention(watched=True)])

    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        largest_keys = []
        for layer in self.layers:
            attended, largest_key = layer(x, position)
            x = x + attended
            largest_keys.append(largest_key)
        return x, largest_keys


def excerpt(path: Path, words: str) -> list[str]:
    """The lines of a file whose comment begins with ``words``, cut to 100 columns."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        code, comment, what = line.strip().partition(f"  # {words}")
        if comment:
            room = 98 - len(comment) - len(what)
            lines.append(f"{code if len(code) <= room else code[: room - 3] + '...'}{comment}{what}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kvcompile_dump"), help="folder for the dump")
    parser.add_argument("--policy", default="int8_per_token_head", help="preset or file")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = Decoder().eval()
    model.compile(backend="kvquant", options={"policy": options.policy, "on_unsupported": "ignore"})
    with torch.no_grad(), kvcompile.debug(options.out) as report:
        model(torch.randn(1, 1, HIDDEN), torch.tensor([0]))

    print(f"Dumped to {options.out}; start with {options.out / 'index.md'}, or {options.out / 'report.html'}\n")
    print(report)
    for stage in ("3_aten", "4_rewritten"):
        path = options.out / "graph_1" / f"{stage}.py"
        lines = excerpt(path, f"{SITE}: ")
        print(f"\n{path} on {SITE}, {min(len(lines), 8)} of {len(lines)} lines:")
        print("\n".join(lines[:8]))


if __name__ == "__main__":
    main()
