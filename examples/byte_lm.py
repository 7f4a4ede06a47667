"""A small byte-level Llama, trained on the source of Python's standard library and kept in the user's cache directory.

Every token is a byte, so the model needs no tokenizer and no download. After some seconds of training, its keys and
values are not random, but it predicts poorly.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

HELD_OUT_EVERY = 16
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True)
class Recipe:
    """The sizes and the training of the model; equal recipes share a trained model.

    Attributes:
        seconds: CPU time of the training, unless ``steps`` is given. It does not depend on other programs.
        steps: number of optimizer steps, for a result that does not depend on the machine's speed.
        seed: the seed of the weights and of the order of the data.
        num_layers, context, batch_size, learning_rate: further parameters.
    """

    seconds: float = 10
    steps: int | None = None
    seed: int = 0
    num_layers: int = 2
    context: int = 256
    batch_size: int = 1
    learning_rate: float = 3e-3

    def progress(self, step: int, elapsed: float) -> float:
        """The finished fraction of the training, 0 to 1."""
        return min(1.0, step / self.steps if self.steps is not None else elapsed / self.seconds)

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=256,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=self.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=16384,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )


def read_corpus() -> tuple[Tensor, Tensor]:
    """The source of the standard library as bytes, uint8 [n]: training text, and every 16th file as held-out text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path for path in sorted(root.rglob("*.py")) if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    if len(files) < 2 * HELD_OUT_EVERY:
        raise SystemExit(f"{root} holds too few Python files to train on; give a trained model with --model")
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for index, path in enumerate(files):
        parts[index % HELD_OUT_EVERY == 0].extend(path.read_bytes())
    training, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return training, held_out


def train(recipe: Recipe, corpus: Tensor, on_step: Callable[[float, float], None]) -> LlamaForCausalLM:
    """Train on random windows of ``corpus``; ``on_step`` gets the progress (0 to 1) and the loss in bits per byte."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.config())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    within = torch.arange(recipe.context + 1)
    begin, step, done = time.process_time(), 0, 0.0
    while done < 1:
        starts = torch.randint(len(corpus) - recipe.context - 1, (recipe.batch_size, 1))
        windows = corpus[starts + within].long()
        for group in optimizer.param_groups:
            group["lr"] = (
                recipe.learning_rate * min(1.0, (step + 1) / 20) * (0.02 + 0.98 * math.cos(done * math.pi / 2))
            )
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        done = recipe.progress(step, time.process_time() - begin)
        on_step(done, loss.item() / math.log(2))
    return model.eval()


def model_folder(recipe: Recipe) -> Path:
    """The folder of a recipe's model, below XDG_CACHE_HOME or ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    what = json.dumps([asdict(recipe), recipe.config().to_dict()], sort_keys=True, default=str)
    return cache / "kvcompile" / f"byte-lm-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def load_or_train(recipe: Recipe, corpus: Tensor, on_step: Callable[[float, float], None]) -> Path:
    """The folder of the trained model. Trains the model if the folder does not exist."""
    folder = model_folder(recipe)
    if not (folder / "config.json").exists():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        train(recipe, corpus, on_step).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder
