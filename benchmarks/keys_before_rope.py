"""The quality of keys that are cached before their rotary embedding, compared with keys that are cached after it.

    python benchmarks/keys_before_rope.py --model FOLDER [--data FILE] [--windows 4] [--formats ...]

Most models cache keys after RoPE. Some cache pre-RoPE keys and apply RoPE in every step (OLMo, x-transformers).
Attention on packed keys then applies RoPE in its kernel. This program reads a text with keys that are quantized and
dequantized either before or after RoPE; values stay exact. It prints the mean Kullback-Leibler divergence of the
predictions, in nats, from the predictions of the model with exact keys. Formats with scales per channel are applied to
blocks of 64 tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcompile.evaluation.models import load_model
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.text import read_text
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.packing import pack_tokens, read_tokens

FORMATS = (
    *("int8_per_token_head", "fp8_e4m3", "int4_unrotated", "int4_per_token_head", "int4_per_channel"),
    *("turboquant_4bit", "turboquant_3bit", "int3_unrotated", "int2_per_channel"),
)


def quantized(keys: Tensor, name: str) -> Tensor:
    """``keys``, [batch, heads, tokens, head_dim], after a round trip through the format ``name``."""
    layout = PackedLayout.parse(name, "key", keys.shape[-1])
    return read_tokens(pack_tokens(layout, keys.float()), layout, keys.shape[2]).to(keys.dtype)


@contextmanager
def quantizing(model: Any, name: str, *, before: bool) -> Iterator[None]:
    """Inside the ``with`` block, ``model`` quantizes its keys before, or after, their rotary embedding."""
    module = sys.modules[type(model).__module__]
    rotate = module.apply_rotary_pos_emb

    def rotate_quantized(q: Tensor, k: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, quantized(k, name) if before else k, *arguments, **options)
        return q, k if before else quantized(k, name)

    module.apply_rotary_pos_emb = rotate_quantized
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = rotate


def divergence(model: Any, windows: Tensor, expected: list[Tensor]) -> float:
    """The mean divergence of the predictions for ``windows``, [windows, tokens], from the log-probabilities given."""
    found = [predictions(model, window) for window in windows]
    nats = [
        F.kl_div(one, other, log_target=True, reduction="batchmean") for one, other in zip(found, expected, strict=True)
    ]
    return torch.stack(nats).mean().item()


def predictions(model: Any, window: Tensor) -> Tensor:
    """Log-probabilities of the next token after each token of a window, [tokens, vocabulary]."""
    with torch.no_grad():
        return model(input_ids=window[None], use_cache=False).logits[0].float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or the name of a model whose keys have RoPE")
    parser.add_argument("--data", type=Path, help="the text; by default val.bin of a byte-level model")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    arguments = parser.parse_args()

    model = load_model(arguments.model, "cpu", "float32")
    text = read_text(model, arguments.model, arguments.data, Schedule(arguments.tokens, 1, 1), arguments.windows)
    windows = text.windows[:, : arguments.tokens]
    expected = [predictions(model, window) for window in windows]
    print(f"{arguments.windows} windows of {arguments.tokens} tokens, torch {torch.__version__}")
    print("| format of keys | KL before RoPE | KL after RoPE | after / before |")
    print("|---|---:|---:|---:|")
    for name in arguments.formats:
        nats = []
        for before in (True, False):
            with quantizing(model, name, before=before):
                nats.append(divergence(model, windows, expected))
        print(f"| `{name}` | {nats[0]:.1e} | {nats[1]:.1e} | {nats[1] / nats[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
