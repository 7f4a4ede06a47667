"""A packaged step on a GPU computes what the compiled model computes, and launches its kernels without Python."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hand_written_model import MAX_TOKENS, tiny_transformer
from package_step import compile_command, generate
from packed_bytes import empty_packed
from shared_fixtures import WITHOUT_VECTORS
from torch import Tensor
from torch._inductor import config as inductor_config

import kvcompile
from kvcompile import PackagedStep, PackageError
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packaging.launches import tracing_launches

pytestmark = pytest.mark.gpu

PROMPT = [3, 141, 59, 26]
FORMAT = "int4_per_token_head"


@pytest.fixture(autouse=True)
def cheaper_wrapper() -> Iterator[None]:
    with inductor_config.patch({"aot_inductor.compile_wrapper_opt_level": "O0", **WITHOUT_VECTORS}):
        yield


def one_token(token: int, position: int) -> dict[str, Tensor]:
    return {"tokens": torch.tensor([[token]], device="cuda"), "input_pos": torch.tensor([position], device="cuda")}


def expected_tokens(policy: str, num_tokens: int) -> list[int]:
    """The greedy tokens of the compiled model, which reads the prompt token by token as the package does."""
    model = tiny_transformer().cuda()
    step = torch.compile(model, backend=kvcompile.kvquant(policy=policy), dynamic=False)
    tokens = list(PROMPT)
    with torch.no_grad():
        for position in range(len(PROMPT) + num_tokens - 1):
            logits = step(**one_token(tokens[position], position))
            if position >= len(PROMPT) - 1:
                tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def package(policy: str, folder: Path) -> PackagedStep:
    model = tiny_transformer().cuda()
    return kvcompile.package(model, kwargs=one_token(0, 0), policy=policy, path=folder / "step.pt2")


@pytest.mark.parametrize("policy", ["int8_per_token_head", "int4", "turboquant_4bit_r128", "fp8_e4m3"])
def test_a_package_generates_the_tokens_of_the_compiled_model(policy: str, tmp_path: Path) -> None:
    step = package(policy, tmp_path)
    assert step.signature.device == "cuda"
    assert generate(step, PROMPT, 80) == expected_tokens(policy, 80)


def test_a_program_in_cpp_generates_the_same_tokens_without_python(tmp_path: Path) -> None:
    step, program = package("int4_per_token_head", tmp_path), tmp_path / "packaged_step"
    subprocess.run(compile_command(program, "cuda"), check=True, capture_output=True)
    arguments = [str(program), str(step.path), "8", *map(str, PROMPT)]
    libraries = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}  # the driver may be found through it
    done = subprocess.run(arguments, capture_output=True, text=True, env=libraries)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert [int(token) for token in printed.split()] == generate(step, PROMPT, 8)


def test_packages_of_a_prompt_and_of_a_token_share_their_caches(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=97, head_dim=64, num_hidden_layers=2, **sizes)
    model = transformers.LlamaForCausalLM(config).cuda().eval()
    ids, policy = torch.randint(97, (2, 130), device="cuda"), "int4_per_token_head"

    def package(name: str, length: int) -> PackagedStep:
        cache = kvcompile.static_cache(model, 2, 192, policy)
        inputs = {"input_ids": ids[:, :length], "past_key_values": cache}
        return kvcompile.package(model, kwargs=inputs, policy=policy, path=tmp_path / f"{name}.pt2")

    prompt, token = package("prompt", 130), package("token", 1)
    caches, cache = prompt.new_caches(), kvcompile.static_cache(model, 2, 192, policy)
    compiled = torch.compile(model, backend=kvcompile.kvquant(policy=policy), dynamic=False)
    new, step, name = ids, prompt, "input_ids"
    with torch.no_grad():
        for _ in range(4):
            logits, expected = step({name: new}, caches)[0], compiled(input_ids=new, past_key_values=cache).logits
            assert (logits.float() - expected.float()).norm() < 2e-2 * expected.float().norm()
            new, step = expected[:, -1:].argmax(-1).contiguous(), token


class CrossAttention(torch.nn.Module):
    """Attention on precomputed keys and values, which the step only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(1, 2, 192, 64, device="cuda"))
        self.register_buffer("values", torch.randn(1, 2, 192, 64, device="cuda"))
        kvcompile.pack_(self)

    def forward(self, q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.values)


def test_a_package_attends_to_a_cache_that_is_a_constant(tmp_path: Path) -> None:
    model, q = CrossAttention(), torch.randn(1, 2, 1, 64, device="cuda")
    expected = model(q)
    step = kvcompile.package(model, [q], policy="int8_per_token_head", path=tmp_path / "step.pt2")
    assert step.new_caches() == {}
    (out,) = step({"q": q}, {})
    assert (out - expected).norm() < 2e-2 * expected.norm()


def test_the_operator_launches_the_kernels_that_python_launches() -> None:
    def call() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        layouts = [PackedLayout.parse(FORMAT, role, 128) for role in ("key", "value")]
        data = [empty_packed(layout, 1000, 2, 2, torch.device("cuda")) for layout in layouts]
        query = torch.randn(2, 4, 8, 128, device="cuda").transpose(1, 2)
        key, value = torch.randn(2, 2, 2, 4, 128, device="cuda")
        mask = torch.rand(2, 1, 4, 1000, device="cuda") < 0.5
        mask[..., 0] = True
        torch.ops.kvcompile.store_pair(*data, key, value, torch.arange(4, device="cuda"), None, FORMAT, FORMAT)
        out = torch.ops.kvcompile.attention(query, *data, mask, None, 1000, False, 0.1, 0.0, FORMAT, FORMAT, 128)
        return out, *data

    expected = call()
    with tracing_launches():
        found = call()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_tensor_on_a_cpu_is_an_error_and_the_last_token_is_written(tmp_path: Path) -> None:
    step = package("int8_per_token_head", tmp_path)
    caches = step.new_caches()
    arguments = {name: tensor.cpu() for name, tensor in one_token(0, 0).items()}
    with pytest.raises(PackageError, match=r"takes 'tokens' as contiguous int64 \[1, 1\] on cuda, not as .* on cpu"):
        step(arguments, caches)
    step(one_token(PROMPT[0], MAX_TOKENS - 1), caches)
    assert all(cache[-1].any() and not cache[:-1].any() for cache in caches.values())
