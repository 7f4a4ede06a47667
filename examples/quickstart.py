"""A comparison of one model under plain Inductor and under ``backend="kvquant"``.

    python examples/quickstart.py                                # trains a small byte-level Llama first (10 seconds)
    python examples/quickstart.py --policy turboquant_4bit_nc
    python examples/quickstart.py --model PATH_OR_HUB_ID --policy policy.yaml

Each variant reads the same long prompt of held-out text into its own cache, and compiles one decode step. Then all
variants predict the following tokens one at a time, in turns. The program prints the report, and a table: bytes of the
KV cache, time of a token, and bits per byte of the text.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from byte_lm import Recipe, load_or_train, model_folder, read_corpus
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache
from transformers.utils.logging import disable_progress_bar

import kvcompile
from kvcompile.compat.transformers import with_cache
from kvcompile.compat.vector_instructions import check_best_instructions_only

PROMPT_CHUNK = 8192
UNTIMED_STEPS = 3

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
        prompt: int64 [context], read into the cache.
        continuation: int64 [new_tokens], predicted one token at a time.
        num_bytes: bytes of the continuation without its first token.
    """

    prompt: Tensor
    continuation: Tensor
    num_bytes: int


class Runner:
    """A way to run the model, with its own cache.

    Attributes:
        name: title of the column.
        format: the policy of the cache, or its dtype.
        step_seconds: time of each decode step.
        logits: float32 [vocab_size] of each decode step.
    """

    def __init__(self, name: str, model: PreTrainedModel, policy: str | None, **compile_arguments: Any) -> None:
        """``policy``: the policy of the cache, which is packed from the start; None for a cache of Transformers."""
        self.format = Path(policy).name if policy is not None else str(model.dtype).removeprefix("torch.")
        self.name = name
        self.model = model
        self.policy = policy
        self.compiled = torch.compile(model, **compile_arguments)
        self.cache: StaticCache | None = None
        self.step_seconds: list[float] = []
        self.logits: list[Tensor] = []

    def read(self, prompt: Tensor, max_len: int) -> None:
        """Read the prompt with the uncompiled model into a new cache for ``max_len`` tokens."""
        if self.policy is None:
            self.cache = StaticCache(config=self.model.config, max_cache_len=max_len)
        else:
            self.cache = kvcompile.static_cache(self.model, batch_size=1, max_len=max_len, policy=self.policy)
        for part in prompt.split(PROMPT_CHUNK):
            self.model(
                input_ids=part[None].to(self.model.device), logits_to_keep=1, **with_cache(self.model, self.cache)
            )

    def step(self, token: Tensor) -> None:
        """Append one token, [1], and predict the next one."""
        torch.compiler.cudagraph_mark_step_begin()
        begin = time.perf_counter()
        output = self.compiled(input_ids=token[None].to(self.model.device), **with_cache(self.model, self.cache))
        self.logits.append(output.logits[0, -1].float().cpu())
        self.step_seconds.append(time.perf_counter() - begin)

    @property
    def milliseconds(self) -> float:
        """The median time of a token, without the steps that compile."""
        return 1e3 * statistics.median(self.step_seconds[UNTIMED_STEPS:])

    @property
    def cache_bytes(self) -> int:
        """Bytes of the storages of all layers of the cache, packed or not."""
        return kvcompile.cache_nbytes(self.cache)

    def bits_per_byte(self, text: Text) -> float:
        """Loss of the continuation, without its first token."""
        logits = torch.stack(self.logits[:-1])
        nats = F.cross_entropy(logits, text.continuation[1:], reduction="sum").item()
        return nats / math.log(2) / text.num_bytes

    def same_choices(self, other: Runner) -> float:
        """The fraction of positions at which both predict the same most likely token."""
        mine, theirs = (torch.stack(runner.logits).argmax(-1) for runner in (self, other))
        return (mine == theirs).float().mean().item()


def measure(runners: Sequence[Runner], text: Text) -> None:
    """Read the prompt with every runner, then predict the continuation: each token by all runners in turns."""
    with torch.no_grad(), Progress(**PROGRESS) as progress:
        task = progress.add_task("", total=2 * len(runners) + len(text.continuation))
        for number, runner in enumerate(runners, 1):
            of_all = f"{runner.name} ({number} of {len(runners)})"
            progress.update(task, description=f"reading the prompt: {of_all}")
            runner.read(text.prompt, len(text.prompt) + len(text.continuation))
            progress.update(task, advance=1, description=f"compiling a step: {of_all}")
            runner.step(text.continuation[:1])
            progress.update(task, advance=1)
        for token in text.continuation[1:].split(1):
            progress.update(task, advance=1, description="decoding, in turns")
            for runner in runners:
                runner.step(token)


def trained_byte_model(recipe: Recipe, corpus: Tensor) -> str:
    """The folder of the byte-level model; trains the model if it is not in the cache directory."""
    with Progress(**PROGRESS) as progress:
        task = progress.add_task("training a byte-level Llama", total=1.0, visible=not model_folder(recipe).exists())

        def on_step(done: float, loss: float) -> None:
            progress.update(task, completed=done, description=f"training a byte-level Llama: {loss:.2f} bits/byte")

        return str(load_or_train(recipe, corpus, on_step))


def held_out_text(model_name: str, vocab_size: int, held_out: Tensor, context: int, new_tokens: int) -> Text:
    """``context + new_tokens`` tokens from the middle of the held-out bytes."""
    encode, decode = codec(model_name, vocab_size)
    middle = held_out[len(held_out) // 2 :][: 16 * (context + new_tokens)]
    tokens = torch.tensor(encode(bytes(middle.tolist())))
    prompt, continuation = tokens[: context + new_tokens].split([context, new_tokens])
    return Text(prompt, continuation, len(decode(continuation[1:])))


def codec(model_name: str, vocab_size: int) -> tuple[Callable[[bytes], list[int]], Callable[[Tensor], bytes]]:
    """Functions from text to tokens and back, from the model's tokenizer; a vocabulary of 256 means bytes."""
    if vocab_size == 256:
        return list, lambda tokens: bytes(tokens.tolist())
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    return (
        lambda text: tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"],
        lambda tokens: str(tokenizer.decode(tokens)).encode(),
    )


def comparison(runners: Sequence[Runner], text: Text) -> Table:
    plain = runners[0]
    rows: dict[str, Callable[[Runner], str]] = {
        "format of the cache": lambda runner: runner.format,
        "KV cache, all layers": lambda runner: f"{runner.cache_bytes / 1e6:,.2f} MB",
        "times smaller than plain": lambda runner: f"{plain.cache_bytes / runner.cache_bytes:.2f}",
        "time of a token": lambda runner: f"{runner.milliseconds:,.2f} ms",
        "times as fast as plain": lambda runner: f"{plain.milliseconds / runner.milliseconds:.2f}",
        "bits per byte": lambda runner: f"{runner.bits_per_byte(text):.4f}",
        "same choices as plain": lambda runner: f"{100 * runner.same_choices(plain):.1f} %",
    }
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for runner in runners:
        table.add_column(runner.name, justify="right", no_wrap=True)
    for title, cell in rows.items():
        table.add_row(title, *map(cell, runners))
    return table


def summary(runners: Sequence[Runner], text: Text, device: str) -> str:
    """The speedup in words, and a note on the speedup of a GPU."""
    plain, fused, packed = (runner.milliseconds for runner in runners)
    threads = torch.get_num_threads()
    where = "a GPU" if device.startswith("cuda") else f"{threads} CPU thread{'s' if threads > 1 else ''}"
    seen = (
        f"With {len(text.prompt):,} tokens in the cache, on {where}, a token is {plain / packed:.1f} times as fast as "
        f"under plain Inductor: {plain / fused:.1f} by the fused path, times {fused / packed:.1f} by fewer bits."
    )
    gpu = (
        "On a GPU a model of this size would gain less, because launching kernels dominates its time; the README has "
        "the figures of a GPU with a model as wide as Llama 3 8B, split in the same way."
    )
    return seen if device.startswith("cuda") else f"{seen}\n{gpu}"


def variants(model: PreTrainedModel, policy: str, dtype: str, device: str) -> list[Runner]:
    """Plain Inductor, the fused path with an unquantized cache, and the policy; on GPUs all with CUDA graphs."""
    mode = "reduce-overhead" if device.startswith("cuda") else None
    runners = [Runner("plain Inductor", model, None, backend="inductor", mode=mode)]
    for name, of_cache in (("fused path", dtype), ("kvquant", policy)):
        backend = kvcompile.kvquant(policy=of_cache, mode=mode)
        runners.append(Runner(name, model, of_cache, backend=backend))
    return runners


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    presets = ", ".join(kvcompile.preset_names())
    parser.add_argument("--policy", default="int8_per_token_head", help=f"a file, or one of {presets}")
    parser.add_argument("--model", help="path or hub id of another model, instead of training one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    dtypes = ["bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", choices=dtypes, help="of model and plain cache (default: float32 on a CPU)")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to predict (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="CPU time for training (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model, few steps, little text: a test of the program"
    )
    args = parser.parse_args(arguments)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    if args.quick:
        args.steps, args.new_tokens, args.context = args.steps or 20, min(args.new_tokens, 32), min(args.context, 256)
    if args.new_tokens <= UNTIMED_STEPS:
        parser.error(f"--new-tokens must be more than {UNTIMED_STEPS}, got {args.new_tokens}")
    if args.context < 1 or args.threads < 1:
        parser.error("--context and --threads must be at least 1")
    try:
        kvcompile.Policy.load(args.policy)
    except kvcompile.PolicyError as error:
        parser.error(str(error))
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    disable_progress_bar()
    torch.set_num_threads(args.threads)  # steps of a tiny model are too short to share among threads
    corpus, held_out = read_corpus()
    recipe = Recipe(seconds=args.seconds, steps=args.steps, seed=args.seed, num_layers=1 if args.quick else 2)
    name = args.model or trained_byte_model(recipe, corpus)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, args.dtype)).eval().to(args.device)
    except OSError as error:
        raise SystemExit(f"--model {name}: {str(error).splitlines()[0]}") from None
    text = held_out_text(name, model.config.vocab_size, held_out, args.context, args.new_tokens)

    if args.device == "cpu":
        check_best_instructions_only()
    runners = variants(model, args.policy, args.dtype, args.device)
    measure(runners, text)
    print(kvcompile.last_report())
    console = Console()
    console.print(comparison(runners, text))
    console.print(summary(runners, text, args.device))


if __name__ == "__main__":
    main()
