"""Train a model for measurements of quality at long contexts: ten minutes on one H100 or H200.

    python benchmarks/train_model.py FOLDER [--minutes 9] [--context 32768]

The model is a Llama of about 90 million parameters with 4 query heads per KV head, head_dim 128 and RoPE. A token is a
byte. The model is trained on the Python sources of the standard library and of the installed packages; some files are
held out and written to FOLDER/val.bin. Training windows contain planted numbers (:mod:`kvcompile.evaluation.recall`),
so that the model learns to retrieve. The training begins with short windows and continues with windows of ``--context``
tokens.

    python -m kvcompile eval --model FOLDER --prefill 31744 --decode 1024 --chunk 64 --recall 32
"""

from __future__ import annotations

import argparse
import math
import random
import site
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from kvcompile.evaluation.recall import number_line

HELD_OUT_EVERY = 64
MOST_BYTES = 1 << 29
SHORT_CONTEXT = 4096
SHORT_FRACTION = 0.6
"""The fraction of the time with short windows: in long windows, attention costs five times as much per token."""
TOKENS_PER_STEP = 1 << 16
LEARNING_RATE = 1e-3
TOKENS_PER_NUMBER = 512
WEIGHT_OF_ANSWERS = 4.0


def model_config(layers: int, width: int, context: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=4 * context,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def read_corpus() -> tuple[Tensor, Tensor]:
    """Python sources of the standard library and of all packages, uint8: for the training, and held out."""
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")} | set(site.getsitepackages())
    files = sorted({path.resolve() for folder in folders for path in Path(folder).rglob("*.py")})
    random.Random(0).shuffle(files)
    parts = bytearray(), bytearray()
    for index, path in enumerate(files):
        if len(parts[0]) >= MOST_BYTES:
            break
        parts[index % HELD_OUT_EVERY == 0].extend(path.read_bytes())
    training, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return training, held_out


def windows(corpus: Tensor, context: int, count: int, source: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows with planted numbers, int64 [count, context + 1], and the weights of predictions."""
    while True:
        starts = torch.tensor([source.randrange(len(corpus) - context - 1) for _ in range(count)])
        batch = corpus[starts[:, None] + torch.arange(context + 1)].long()
        weights = torch.ones(count, context)
        for window, weight in zip(batch, weights, strict=True):
            plant(window, weight, source)
        yield batch, weights


def plant(window: Tensor, weight: Tensor, source: random.Random) -> None:
    """Write lines with numbers, and the same lines again later in the window; digits of repeated lines weigh more."""
    length = len("".join(number_line(random.Random(0)))) + 1
    places = list(range(0, len(window) - length, TOKENS_PER_NUMBER // 2))
    source.shuffle(places)
    for first, second in zip(places[::2], places[1::2], strict=False):
        before, digits = number_line(source)
        line = torch.tensor(list(f"{before}{digits}\n".encode()))
        for place in (first, second):
            window[place : place + length] = line
        answer = max(first, second) + len(before)
        weight[answer - 1 : answer - 1 + len(digits)] = WEIGHT_OF_ANSWERS


def train(model: LlamaForCausalLM, corpus: Tensor, context: int, seconds: float) -> None:
    """Train until the time is over."""
    device, source = model.device, random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    data = {
        length: windows(corpus, length, max(1, TOKENS_PER_STEP // length), source)
        for length in (min(SHORT_CONTEXT, context), context)
    }
    begin = last = time.monotonic()
    step = tokens = 0
    while (done := (time.monotonic() - begin) / seconds) < 1:
        length = min(SHORT_CONTEXT, context) if done < SHORT_FRACTION else context
        batch, weights = (x.to(device) for x in next(data[length]))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * math.cos(done * math.pi / 2))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, tokens = step + 1, tokens + batch[:, 1:].numel()
        if time.monotonic() - last > 15:
            last = time.monotonic()
            answers = losses[weights.flatten() > 1].mean().item() / math.log(2)
            print(
                f"{100 * done:3.0f} %: {tokens / 1e6:.0f} M bytes, context {length}, "
                f"{losses.mean().item() / math.log(2):.3f} bits per byte, {answers:.2f} bits per digit",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    corpus, held_out = read_corpus()
    config = model_config(arguments.layers, arguments.width, arguments.context)
    model = LlamaForCausalLM(config).to(arguments.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.0f} M parameters, {len(corpus) / 1e6:.0f} M bytes of Python, {len(held_out)} held out")
    train(model, corpus, arguments.context, 60 * arguments.minutes)
    model.eval().to(torch.bfloat16).save_pretrained(arguments.folder)
    (arguments.folder / "val.bin").write_bytes(bytes(held_out.numpy()))


if __name__ == "__main__":
    main()
