"""Reference models of other projects with small random weights, driven by the loops of these projects.

Each function builds a model, compiles its ``forward``, and calls the loop of the project, which chooses the most likely
tokens. Loops are written for CUDA devices; here they make their tensors on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from outside.stand_ins import stand_ins

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

VOCAB = 96
PROMPT = (5, 17, 3, 42, 8, 60, 11)
NEW_TOKENS = 10


@dataclass(frozen=True)
class Reference:
    """A model and the loop that drives it.

    Attributes:
        name: the project and the model.
        source: the folder of the project among the sources.
        run: takes the folder and a compiler, and returns the tokens and the logits of the last position of each step.
    """

    name: str
    source: str
    run: Callable[[Path, Compile], tuple[Tensor, Tensor]]


def gpt_fast(folder: Path, compile: Compile) -> tuple[Tensor, Tensor]:
    loop = _module(folder, "generate")
    args = _module(folder, "model").ModelArgs(
        block_size=64, vocab_size=VOCAB, n_layer=2, n_head=4, n_local_heads=2, dim=64, intermediate_size=96
    )
    model = _initialized(loop.Transformer(args))
    logits = _compile_forward(model, compile)
    prompt = torch.tensor(PROMPT, dtype=torch.int)
    tokens, _ = loop.generate(model, prompt, NEW_TOKENS, 1, interactive=False, draft_model=None, top_k=1)
    return tokens, torch.cat(logits)


def gpt_fast_steps(folder: Path, compile: Compile) -> tuple[Tensor, Tensor]:
    """Compile what gpt-fast's script compiles: the prompt, and each step with the choice of its token.

    The loop returns no logits.
    """
    loop = _module(folder, "generate")
    args = _module(folder, "model").ModelArgs(
        block_size=64, vocab_size=VOCAB, n_layer=2, n_head=4, n_local_heads=2, dim=64, intermediate_size=96
    )
    model = _initialized(loop.Transformer(args))
    prompt = torch.tensor(PROMPT, dtype=torch.int)
    compiled = {name: compile(getattr(loop, name)) for name in ("prefill", "decode_one_token")}
    with mock.patch.multiple(loop, **compiled):
        tokens, _ = loop.generate(model, prompt, NEW_TOKENS, 2, interactive=False, draft_model=None, top_k=1)
    return tokens, torch.zeros(0, VOCAB)


def llama3(folder: Path, compile: Compile) -> tuple[Tensor, Tensor]:
    with _one_rank():
        code = _module(folder, "llama.model")
        loop = _module(folder, "llama.generation")
        args = code.ModelArgs(
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=VOCAB,
            multiple_of=32,
            max_batch_size=2,
            max_seq_len=32,
        )
        with mock.patch.object(Tensor, "cuda", lambda self: self), mock.patch.object(loop, "torch", _OnCpu()):
            model = _initialized(code.Transformer(args))
            logits = _compile_forward(model, compile)
            llama = loop.Llama(model, SimpleNamespace(pad_id=-1, stop_tokens=[]))
            tokens, _ = llama.generate([list(PROMPT), list(PROMPT[:4])], NEW_TOKENS, temperature=0)
    return torch.tensor(tokens), torch.cat(logits)


def deepseek_v3(folder: Path, compile: Compile, attention: str) -> tuple[Tensor, Tensor]:
    loop, code = _module(folder / "inference", "generate"), _module(folder / "inference", "model")
    args = code.ModelArgs(
        max_batch_size=2, max_seq_len=64, vocab_size=VOCAB, dim=64, inter_dim=96, moe_inter_dim=32, n_layers=2,
        n_heads=4, n_dense_layers=1, n_routed_experts=4, n_activated_experts=2, n_shared_experts=1, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32,
    )  # fmt: skip
    with mock.patch.object(code, "attn_impl", attention), mock.patch.object(loop, "torch", _OnCpu()):
        model = _initialized(code.Transformer(args).float())
        logits = _compile_forward(model, compile)
        tokens = loop.generate(model, [list(PROMPT), list(PROMPT[:4])], NEW_TOKENS, -1, temperature=0)
    return torch.tensor(tokens), torch.cat(logits)


def litgpt(folder: Path, compile: Compile) -> tuple[Tensor, Tensor]:
    loop, code = _module(folder, "litgpt.generate.base"), _module(folder, "litgpt.model")
    config = code.Config(block_size=64, n_layer=2, n_embd=64, n_head=4, n_query_groups=2, padded_vocab_size=VOCAB)
    model = _initialized(code.GPT(config))
    model.max_seq_length = 32
    model.set_kv_cache(batch_size=1)
    logits = _compile_forward(model, compile)
    prompt = torch.tensor(PROMPT)
    return loop.generate(model, prompt, len(PROMPT) + NEW_TOKENS, top_k=1), torch.cat(logits)


def torchtune(folder: Path, compile: Compile) -> tuple[Tensor, Tensor]:
    with stand_ins("torchvision", "kagglehub", "blobfile"):
        loop, models = _module(folder, "torchtune.generation"), _module(folder, "torchtune.models.llama3")
    model = _initialized(
        models.llama3(
            vocab_size=VOCAB,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            embed_dim=64,
            max_seq_len=64,
            intermediate_dim=96,
        )
    )
    model.setup_caches(batch_size=2, dtype=torch.float32, decoder_max_seq_len=32)
    logits = _compile_forward(model, compile)
    prompts = torch.tensor([PROMPT, (0, 0, 0, *PROMPT[:4])])
    tokens, _ = loop.generate(model, prompts, max_generated_tokens=NEW_TOKENS, pad_id=0, top_k=1)
    return tokens, torch.cat(logits)


def gemma(folder: Path, compile: Compile) -> tuple[Tensor, Tensor]:
    """Two sequences of different lengths in a Gemma 2, with a sliding window in every other layer."""
    with stand_ins("immutabledict", "sentencepiece"):
        code, config = _module(folder, "gemma.model"), _module(folder, "gemma.config")
    args = config.get_config_for_2b_v2(dtype="float32")
    args.vocab_size, args.num_hidden_layers, args.num_attention_heads, args.num_key_value_heads = VOCAB, 2, 4, 2
    args.hidden_size, args.intermediate_size, args.head_dim = 64, 96, 16
    args.max_position_embeddings, args.sliding_window_size = 64, 8
    tokenizer = SimpleNamespace(encode=list, decode=list, pad_id=0, eos_id=-1)
    with mock.patch.object(code.tokenizer, "Tokenizer", return_value=tokenizer):
        model = _initialized(code.GemmaForCausalLM(args))
    logits = _compile_forward(model, compile)
    tokens = model.generate([PROMPT, PROMPT[:4]], "cpu", NEW_TOKENS, temperature=None)
    return torch.tensor([own[: NEW_TOKENS - 3] for own in tokens]), torch.cat(logits)


def from_scratch(folder: Path, compile: Compile) -> tuple[Tensor, Tensor]:
    with stand_ins("tokenizers"):
        code = _module(folder / "pkg", "llms_from_scratch.kv_cache.qwen3")
        loop = _module(folder / "pkg", "llms_from_scratch.kv_cache.generate")
    config = {
        "vocab_size": VOCAB, "context_length": 64, "emb_dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 96,
        "head_dim": 16, "qk_norm": True, "n_kv_groups": 2, "rope_base": 1e4, "dtype": torch.float32,
    }  # fmt: skip
    model = _initialized(code.Qwen3Model(config))
    logits = _compile_forward(model, compile)
    return loop.generate_text_simple(model, torch.tensor([PROMPT]), NEW_TOKENS), torch.cat(logits)


def whisper(folder: Path, compile: Compile) -> tuple[Tensor, Tensor]:
    """The decoder with the hooks that keep its keys and values, also for cross attention."""
    with stand_ins("numba", "tiktoken", "more_itertools"):
        code, loop = _module(folder, "whisper.model"), _module(folder, "whisper.decoding")
    sizes = {"n_mels": 8, "n_audio_ctx": 20, "n_audio_layer": 1, "n_text_ctx": 64, "n_text_layer": 2, "n_vocab": VOCAB}
    sizes |= {f"n_{part}_{size}": n for part in ("audio", "text") for size, n in (("state", 64), ("head", 4))}
    model = _initialized(code.Whisper(code.ModelDimensions(**sizes)))
    logits = _compile_forward(model.decoder, compile)
    tokens, audio = torch.tensor([PROMPT, PROMPT[::-1]]), torch.randn(2, 20, 64, generator=torch.manual_seed(0))
    inference = loop.PyTorchInference(model, len(PROMPT))
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            last = inference.logits(tokens, audio)[:, -1]
            tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], dim=1)
    inference.cleanup_caching()
    return tokens, torch.cat(logits)


REFERENCES = (
    Reference("gpt-fast, the model", "gpt-fast", gpt_fast),
    Reference("gpt-fast, its compiled steps", "gpt-fast", gpt_fast_steps),
    Reference("llama3", "llama3", llama3),
    Reference("DeepSeek-V3, naive", "DeepSeek-V3", lambda folder, compile: deepseek_v3(folder, compile, "naive")),
    Reference("DeepSeek-V3, absorb", "DeepSeek-V3", lambda folder, compile: deepseek_v3(folder, compile, "absorb")),
    Reference("litgpt", "litgpt", litgpt),
    Reference("torchtune, llama3", "torchtune", torchtune),
    Reference("gemma_pytorch", "gemma_pytorch", gemma),
    Reference("LLMs-from-scratch, qwen3", "LLMs-from-scratch", from_scratch),
    Reference("whisper, the decoder", "whisper", whisper),
)


def _compile_forward(model: nn.Module, compile: Compile) -> list[Tensor]:
    """Compile the forward of ``model``. Returns the list that gets the logits of the last position of each call."""
    found: list[Tensor] = []
    compiled = compile(model.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        logits = result[1] if isinstance(result, tuple) else result
        last = logits if logits.ndim == 2 else logits[:, -1]
        found.append(last.detach().clone().float())
        return result

    model.forward = forward
    return found


def _initialized(model: nn.Module, seed: int = 0) -> Any:
    """``model`` with random weights that a seed determines. Weights of norms stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if weight.ndim == 1 else noise / weight.shape[-1] ** 0.5)
    return model.eval()


def _module(folder: Path, name: str) -> Any:
    """Import a module of a project from its folder, or from an installed package if there is no such folder."""
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


class _OnCpu:
    """``torch``, whose functions make tensors on the CPU where they are asked for a CUDA device."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("full", "tensor"):
            return found
        return lambda *args, **kwargs: found(*args, **{key: kwargs[key] for key in kwargs if key != "device"})


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of one rank, which fairscale's layers need."""
    import torch.distributed as dist
    from fairscale.nn.model_parallel import initialize

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize.initialize_model_parallel(1)
    try:
        yield
    finally:
        initialize.destroy_model_parallel()
        dist.destroy_process_group()
