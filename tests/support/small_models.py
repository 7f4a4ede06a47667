"""Byte-level Llamas for tests of the evaluation: saved to a folder, or with outlier keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_llama import tiny_llama

HEAD_DIM = 32
CONTEXT = 160
MODULES = ("model.layers.0.self_attn", "model.layers.1.self_attn")


def small_model(num_layers: int = 2, vocab_size: int = 256) -> Any:
    """A Llama with random weights. With a vocabulary of 256, its tokens are bytes."""
    return tiny_llama(
        num_layers=num_layers,
        vocab_size=vocab_size,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
    )


def some_bytes(count: int) -> bytes:
    return bytes(torch.randint(256, (count,), generator=torch.Generator().manual_seed(1)).tolist())


def save(model: Any, folder: Path) -> None:
    """Save a byte-level model, with held-out text in its folder."""
    model.save_pretrained(folder)
    (folder / "val.bin").write_bytes(some_bytes(2000))


@torch.no_grad()
def give_outlier_keys(model: Any, factor: float, pair: int = 3, layers: tuple[int, ...] = (0, 1)) -> Any:
    """Scale a RoPE pair of channels by ``factor`` in every key head, and by its inverse in every query head.

    For powers of two, the results of the model do not change at all.
    """
    for layer in layers:
        attention = model.model.layers[layer].self_attn
        for projection, scale in ((attention.k_proj, factor), (attention.q_proj, 1 / factor)):
            heads = projection.weight.unflatten(0, (-1, attention.head_dim))
            heads[:, [pair, pair + attention.head_dim // 2]] *= scale
    return model
