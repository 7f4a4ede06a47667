"""A decoder in plain PyTorch, in the style of gpt-fast: cache buffers, a compiled function for one token, a loop.

    python examples/hand_written_model.py
    python examples/hand_written_model.py --policy int4_per_token_head

The model does not refer to kvcompile: the backend finds the two buffers from their uses in the graph.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvcompile

VOCAB_SIZE, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_TOKENS = 256, 128, 4, 2, 64, 512


class Attention(nn.Module):
    """Causal attention with grouped queries, rotary positions and a cache of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN, bias=False)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, NUM_KV_HEADS, MAX_TOKENS, HEAD_DIM))

    def forward(self, x: Tensor, rotation: Tensor, input_pos: Tensor, visible: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
        q, k = rotate_pairs(q, rotation), rotate_pairs(k, rotation)
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=visible, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.gate_up, self.down = nn.Linear(HIDDEN, 512, bias=False), nn.Linear(256, HIDDEN, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, input_pos: Tensor, visible: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, input_pos, visible)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(num_layers)])
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB_SIZE, bias=False)
        angles = torch.arange(MAX_TOKENS)[:, None] * 1e4 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("rotations", torch.stack([angles.cos(), angles.sin()], dim=-1))

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """Tokens [1, n] at positions ``input_pos`` [n] -> logits [1, n, VOCAB_SIZE]."""
        visible = torch.arange(MAX_TOKENS, device=tokens.device) <= input_pos[:, None]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotations[input_pos], input_pos, visible)
        return self.head(self.norm(x))


def rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions: rotates pairs of channels of x [1, heads, n, HEAD_DIM] by rotation [n, HEAD_DIM / 2, 2]."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def tiny_transformer(num_layers: int = 1) -> Transformer:
    torch.manual_seed(0)
    return Transformer(num_layers).eval()


@torch.no_grad()
def generate(model: Transformer, decode_one_token: nn.Module, prompt: Tensor, num_tokens: int) -> Tensor:
    """``prompt`` [1, n] and its continuation: an eager prefill, then one compiled step for each token."""
    tokens = [prompt, model(prompt, torch.arange(prompt.shape[1]))[:, -1:].argmax(-1)]
    for position in range(prompt.shape[1], prompt.shape[1] + num_tokens - 1):
        tokens.append(decode_one_token(tokens[-1], torch.tensor([position]))[:, -1:].argmax(-1))
    return torch.cat(tokens, dim=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="int8_per_token_head", help="preset or file")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    prompt = torch.randint(0, VOCAB_SIZE, (1, 64), generator=torch.Generator().manual_seed(0))

    plain = tiny_transformer()
    expected = generate(plain, plain, prompt, options.new_tokens)
    packed = tiny_transformer()
    decode_one_token = torch.compile(packed, backend="kvquant", fullgraph=True, options={"policy": options.policy})
    tokens = generate(packed, decode_one_token, prompt, options.new_tokens)

    print(kvcompile.last_report())
    caches = ([layer.attention.k_cache, layer.attention.v_cache] for model in (plain, packed) for layer in model.layers)
    before, after = (kvcompile.cache_nbytes(cache) for cache in caches)
    same = (tokens == expected)[:, prompt.shape[1] :].float().mean()
    print(f"cache of all layers: {before} bytes in float32 -> {after} bytes packed")
    print(f"{100 * same:.0f} % of the tokens are the same")


if __name__ == "__main__":
    main()
