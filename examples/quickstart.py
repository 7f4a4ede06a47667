"""The main purpose of kvcompile: the same model under plain Inductor and under ``backend="kvquant"``, side by side.

    python examples/quickstart.py                                # trains a small byte-level Llama first (a minute)
    python examples/quickstart.py --policy turboquant_4bit_nc
    python examples/quickstart.py --model PATH_OR_HUB_ID --policy policy.yaml

Prints the report, the generated text, tokens per second, the bytes of the KV cache (measured from its storages) and
bits per byte of held-out text.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from byte_lm import Recipe, load_or_train, model_folder, read_corpus
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache

import kvcompile

PROMPT_TOKENS = 128
CHUNK_TOKENS = 16
WARM_UP_TOKENS = 4
TEMPERATURE = 0.8

STDERR = Console(stderr=True)
PROGRESS: dict[str, Any] = {
    "console": STDERR,
    "disable": not STDERR.is_terminal,
    "transient": True,
    "refresh_per_second": 4,
}


@dataclass(frozen=True)
class Text:
    """Held-out text in the model's tokens.

    Attributes:
        windows: int64 [num_windows, window_tokens].
        num_bytes: bytes of the text in the windows, without the first token of each window.
        decode: converts tokens to text.
    """

    windows: Tensor
    num_bytes: int
    decode: Callable[[Tensor], bytes]


@dataclass(frozen=True)
class Measurement:
    """The results of one backend.

    Attributes:
        tokens_per_second: speed of decoding one token at a time, from the median step.
        cache_bytes: bytes of the cache's storages.
        bits_per_byte: loss on held-out text that is read through the cache.
        text: the prompt and the generated text.
    """

    tokens_per_second: float
    cache_bytes: int
    bits_per_byte: float
    text: str


class Runner:
    """Generates and evaluates with one backend."""

    def __init__(self, name: str, model: PreTrainedModel, new_tokens: int, seed: int, **compile_arguments: Any) -> None:
        self.name = name
        self.model = model
        self.new_tokens = new_tokens
        self.seed = seed
        self.compiled = torch.compile(model, **compile_arguments)

    @torch.no_grad()
    def measure(self, text: Text) -> Measurement:
        prompt = text.windows[0, :PROMPT_TOKENS]
        self.generate(prompt, WARM_UP_TOKENS, "compiling")
        tokens, step_seconds, cache = self.generate(prompt, self.new_tokens, "generating")
        return Measurement(
            tokens_per_second=1 / statistics.median(step_seconds),
            cache_bytes=kvcompile.cache_nbytes(cache),
            bits_per_byte=self.bits_per_byte(text),
            text=text.decode(torch.cat([prompt, tokens])).decode(errors="replace"),
        )

    def generate(self, prompt: Tensor, num_tokens: int, what: str) -> tuple[Tensor, list[float], StaticCache]:
        """Sample ``num_tokens`` tokens; returns them, the seconds of each decode step, and the cache."""
        generator = torch.Generator().manual_seed(self.seed)
        cache = self.new_cache()
        logits = self.forward(prompt, cache)
        tokens, step_seconds = [], []
        for _ in self.track(range(num_tokens), what):
            begin = time.perf_counter()
            tokens.append(torch.multinomial((logits[-1] / TEMPERATURE).softmax(-1), 1, generator=generator))
            logits = self.forward(tokens[-1], cache)
            step_seconds.append(time.perf_counter() - begin)
        return torch.cat(tokens), step_seconds, cache

    def bits_per_byte(self, text: Text) -> float:
        """Score all tokens except the first one of each window: a prefill, then chunks, all through the cache."""
        nats = 0.0
        for window in self.track(text.windows, "reading held-out text"):
            cache = self.new_cache()
            for part in split_window(len(window) - 1):
                logits = self.forward(window[part], cache)
                nats += F.cross_entropy(logits, window[part.start + 1 : part.stop + 1], reduction="sum").item()
        return nats / math.log(2) / text.num_bytes

    def new_cache(self) -> StaticCache:
        return StaticCache(config=self.model.config, max_cache_len=PROMPT_TOKENS + self.new_tokens)

    def forward(self, tokens: Tensor, cache: StaticCache) -> Tensor:
        """Append ``tokens`` to the cache; returns the logits [len(tokens), vocab_size] of the next tokens."""
        output = self.compiled(input_ids=tokens[None].to(self.model.device), past_key_values=cache)
        return output.logits[0].float().cpu()

    def track(self, items: Iterable[Any], what: str) -> Iterable[Any]:
        return track(items, f"{self.name}: {what}", **PROGRESS)


def split_window(num_tokens: int) -> list[slice]:
    """A window as a prefill of PROMPT_TOKENS and chunks of CHUNK_TOKENS."""
    starts = [0, *range(PROMPT_TOKENS, num_tokens, CHUNK_TOKENS), num_tokens]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def trained_byte_model(recipe: Recipe, corpus: Tensor) -> str:
    """The folder of the byte-level model; trains the model if it is not in the cache directory."""
    with Progress(**PROGRESS) as progress:
        task = progress.add_task("training a byte-level Llama", total=1.0, visible=not model_folder(recipe).exists())

        def on_step(done: float, loss: float) -> None:
            progress.update(task, completed=done, description=f"training a byte-level Llama: {loss:.2f} bits/byte")

        return str(load_or_train(recipe, corpus, on_step))


def held_out_text(model_name: str, vocab_size: int, held_out: Tensor, num_windows: int, new_tokens: int) -> Text:
    """Windows of the held-out bytes, spread evenly, in the model's tokens."""
    encode, decode = codec(model_name, vocab_size)
    tokens = torch.tensor(encode(bytes(held_out.tolist())))
    length = PROMPT_TOKENS + new_tokens // CHUNK_TOKENS * CHUNK_TOKENS + 1
    starts = torch.linspace(0, len(tokens) - length, num_windows).long()
    windows = tokens[starts[:, None] + torch.arange(length)]
    return Text(windows, sum(len(decode(window[1:])) for window in windows), decode)


def codec(model_name: str, vocab_size: int) -> tuple[Callable[[bytes], list[int]], Callable[[Tensor], bytes]]:
    """Functions from text to tokens and back, from the model's tokenizer; a vocabulary of 256 means bytes."""
    if vocab_size == 256:
        return list, lambda tokens: bytes(tokens.tolist())
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    return (
        lambda text: tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"],
        lambda tokens: str(tokenizer.decode(tokens)).encode(),
    )


def printable(text: str) -> str:
    """Text without control characters: a barely trained model writes any byte, and a terminal would obey it."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)


def comparison(plain: Measurement, packed: Measurement, policy: str) -> Table:
    table = Table()
    for name in ("", "plain Inductor", f"kvquant, {policy}", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    rows: list[tuple[str, float, float, str]] = [
        ("tokens per second", plain.tokens_per_second, packed.tokens_per_second, ",.1f"),
        ("bytes of the KV cache", plain.cache_bytes, packed.cache_bytes, ",.0f"),
        ("bits per byte", plain.bits_per_byte, packed.bits_per_byte, ".4f"),
    ]
    for name, before, after, style in rows:
        table.add_row(name, format(before, style), format(after, style), f"{after / before:.4f}")
    return table


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    presets = ", ".join(kvcompile.preset_names())
    parser.add_argument("--policy", default="int8_per_token_head", help=f"a file, or one of {presets}")
    parser.add_argument("--model", help="path or hub id of another model, instead of training one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=8, help="windows of held-out text (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="time for training (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model, few steps, little text: a test of the program"
    )
    args = parser.parse_args(arguments)
    if args.quick:
        args.steps, args.new_tokens, args.windows = args.steps or 20, min(args.new_tokens, 64), 1
    if args.new_tokens < CHUNK_TOKENS:
        parser.error(f"--new-tokens must be at least {CHUNK_TOKENS}, got {args.new_tokens}")
    try:
        kvcompile.Policy.load(args.policy)
    except kvcompile.PolicyError as error:
        parser.error(str(error))
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    corpus, held_out = read_corpus()
    recipe = Recipe(seconds=args.seconds, steps=args.steps, seed=args.seed, num_layers=1 if args.quick else 3)
    name = args.model or trained_byte_model(recipe, corpus)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, args.dtype)).eval().to(args.device)
    except OSError as error:
        raise SystemExit(f"--model {name}: {str(error).splitlines()[0]}") from None
    text = held_out_text(name, model.config.vocab_size, held_out, args.windows, args.new_tokens)

    plain = Runner("plain Inductor", model, args.new_tokens, args.seed, backend="inductor").measure(text)
    with kvcompile.collect_reports() as report:
        options = {"policy": args.policy}
        packed = Runner("kvquant", model, args.new_tokens, args.seed, backend="kvquant", options=options).measure(text)

    print(report)
    for title, measurement in (("plain Inductor", plain), ("kvquant", packed)):
        print(f"\n--- text under {title} ---\n{printable(measurement.text)}")
    Console().print(comparison(plain, packed, args.policy))


if __name__ == "__main__":
    main()
