"""A chat in the terminal with a packed KV cache. Answers stream, and the cache of the system prompt is saved to a file.

    python examples/chat.py                                     # a tiny random model: it answers nonsense
    python examples/chat.py --model PATH_TO_A_MODEL --policy int4 --system "You are brief."
    python examples/chat.py --model PATH_TO_A_MODEL --cache system.safetensors   # reads the system prompt once
    echo "Hello" | python examples/chat.py

Every line of input is a message. The conversation stays in one packed cache, so each answer reads only the new tokens.
After each answer the program prints tokens per second, the bytes of the cache, and the bytes of a plain cache.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tiny_models import tiny_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

import kvcompile
from kvcompile.compat.transformers import with_cache

SYSTEM = "You are a helpful assistant. You answer in a few words."


class Bytes:
    """The tokenizer of the tiny model, and of models with a vocabulary of 256: a token is a byte."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        text = bytes(token % 256 for token in tokens).decode(errors="replace")
        return "".join(character if character.isprintable() else "\ufffd" for character in text)


class Stream(BaseStreamer):
    """Writes tokens as they arrive, and records the times.

    Attributes:
        times: when the prompt and each token arrived.
    """

    def __init__(self, decode: Callable[[list[int]], str], write: Callable[[str], object]) -> None:
        self._decode, self._write = decode, write
        self._tokens: list[int] = []
        self._written = ""
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called by ``generate()`` with the prompt, and then with each token."""
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            return
        self._tokens += value.flatten().tolist()
        text = self._decode(self._tokens)
        if not text.endswith("\ufffd") or self._tokens[-1] < 128:  # an incomplete character waits for the next token
            self._write(text[len(self._written) :])
            self._written = text

    def end(self) -> None:
        """Called after the last token."""
        self._write(self._decode(self._tokens)[len(self._written) :] + "\n")

    @property
    def tokens_per_second(self) -> float:
        """The speed after the first token, from the median step: the first step compiles."""
        steps = [after - before for before, after in itertools.pairwise(self.times[1:])]
        return 1 / statistics.median(steps) if steps else 0.0


class Chat:
    """A conversation.

    Attributes:
        tokens: int64 [1, n], the conversation so far.
        cache: the packed cache of the conversation.
    """

    def __init__(self, model: Any, tokenizer: Any, policy: str, max_len: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.policy = policy
        self.max_len = max_len
        self.tokens = torch.empty(1, 0, dtype=torch.long)
        self.cache: Any = None

    def begin(self, system: str, file: Path | None) -> str:
        """Read the system prompt, or load its cache; then compile the model. Returns a line for the user."""
        self.tokens = self._encoded([{"role": "system", "content": system}])
        about = {"system": system, "policy": self.policy, "max_len": str(self.max_len)}
        done = f"read the {self.tokens.shape[1]} tokens of the system prompt"
        if file is not None and file.exists():
            self.cache = kvcompile.load_cache(file, self.model.device, about, model=self.model)
            done = f"loaded the cache of the {self.tokens.shape[1]} tokens of the system prompt from {file}"
        else:
            self.cache = kvcompile.static_cache(self.model, batch_size=1, max_len=self.max_len, policy=self.policy)
            with torch.no_grad():
                self.model(self.tokens.to(self.model.device), **with_cache(self.model, self.cache))
            if file is not None:
                kvcompile.save_cache(self.cache, file, about, model=self.model)
                done += f", and saved their cache to {file}"
        kvcompile.compile(self.model, policy=self.policy)
        return done

    def answer(self, message: str, new_tokens: int, write: Callable[[str], object]) -> Stream:
        """Stream the answer to a message. Both become part of the conversation."""
        new = self._encoded([{"role": "user", "content": message}], reply=True)
        prompt = torch.cat([self.tokens, new], dim=1)
        stream = Stream(self.tokenizer.decode, write)
        self.tokens = self.model.generate(
            prompt.to(self.model.device),
            attention_mask=torch.ones_like(prompt, device=self.model.device),
            **with_cache(self.model, self.cache),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=stream,
        ).cpu()
        return stream

    def plain_bytes(self) -> int:
        """Bytes of the same keys and values in the dtype of the model."""
        tensors = [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)

    def _encoded(self, messages: list[dict[str, str]], reply: bool = False) -> Tensor:
        """Messages in the model's chat format, if it has one, as tokens [1, n]."""
        if getattr(self.tokenizer, "chat_template", None):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply)
        else:
            text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
            text += "assistant: " if reply else ""
        return torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])


def converse(chat: Chat, messages: Iterable[str], new_tokens: int, console: Console) -> None:
    """Answer every message until the cache is full."""
    for message in messages:
        room = chat.max_len - chat.tokens.shape[1] - new_tokens
        if len(chat.tokenizer.encode(message)) > room:
            console.print("the cache is full: give a larger --max-len")
            return
        stream = chat.answer(message, new_tokens, lambda text: console.out(text, end="", highlight=False))
        packed, plain = kvcompile.cache_nbytes(chat.cache), chat.plain_bytes()
        dtype = str(chat.model.dtype).removeprefix("torch.")
        console.out(
            f"[{stream.tokens_per_second:.1f} tokens/s; {chat.tokens.shape[1]} of {chat.max_len} tokens; "
            f"cache {packed:,} bytes, {plain / packed:.2f} times smaller than {dtype} ({plain:,})]",
            style="dim",
            highlight=False,
        )


def typed(console: Console) -> Iterable[str]:
    """The nonempty lines of the input; a terminal shows a prompt."""
    while True:
        if sys.stdin.isatty():
            console.out("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def loaded(name: str | None, device: str) -> tuple[Any, Any]:
    """A model and its tokenizer; the tiny random model if ``name`` is None."""
    if name is None:
        return tiny_llama(2).to(torch.bfloat16), Bytes()
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval().to(device)
        tokenizer = Bytes() if model.config.vocab_size == 256 else AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {name}: {str(error).splitlines()[0]}") from None
    return model, tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal language model (default: a tiny random Llama)")
    parser.add_argument("--policy", default="int8_per_token_head", help="preset or file (default: %(default)s)")
    parser.add_argument("--system", default=SYSTEM, help="the system prompt")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="keeps the packed cache of the system prompt")
    parser.add_argument("--message", action="append", help="a message, in place of the input; may be repeated")
    parser.add_argument("--max-len", type=int, default=2048, help="tokens of the cache (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    console = Console()
    try:
        chat = Chat(*loaded(options.model, options.device), options.policy, options.max_len)
        console.out(chat.begin(options.system, options.cache), style="dim", highlight=False)
    except kvcompile.KVCompileError as error:
        raise SystemExit(str(error)) from None
    converse(chat, options.message or typed(console), options.new_tokens, console)


if __name__ == "__main__":
    main()
