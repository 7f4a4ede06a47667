"""A packaged step computes what the compiled model computes, without the model, and refuses what it cannot hold."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import package_step
import pytest
import torch
import torch.nn.functional as F
from calibrated_bases import write_transforms
from hand_written_model import VOCAB_SIZE, tiny_transformer
from package_step import compile_command, generate
from shared_fixtures import WITHOUT_VECTORS
from torch import Tensor
from torch._inductor import config as inductor_config

import kvcompile
from kvcompile import PackagedStep, PackageError, PackedTensor, UnsupportedSiteError
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packaging.capture import Captured, capture
from kvcompile.packaging.signature import Signature, StepInput, TensorType

PROMPT = [3, 141, 59, 26]


def one_token(position: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[PROMPT[0]]]), torch.tensor([position])


def expected_tokens(policy: str, num_tokens: int) -> list[int]:
    """The greedy tokens of the compiled model, which reads the prompt token by token as the package does."""
    model = tiny_transformer()
    return greedy_tokens(torch.compile(model, backend=kvcompile.kvquant(policy=policy), dynamic=False), num_tokens)


def greedy_tokens(step: Callable[..., Tensor], num_tokens: int) -> list[int]:
    tokens = list(PROMPT)
    with torch.no_grad():
        for position in range(len(PROMPT) + num_tokens - 1):
            logits = step(torch.tensor([[tokens[position]]]), torch.tensor([position]))
            if position >= len(PROMPT) - 1:
                tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def packed_transformer() -> torch.nn.Module:
    """The model with caches that are packed from the start."""
    model = tiny_transformer()
    for attention in (layer.attention for layer in model.layers):
        for name, role in (("k_cache", "key"), ("v_cache", "value")):
            cache = getattr(attention, name)
            layout = PackedLayout("int8_per_token_head", role, cache.shape[-1])
            setattr(attention, name, PackedTensor.from_dense(cache, layout))
    return model


CHEAPER = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    **WITHOUT_VECTORS,
}
"""Settings that make Inductor faster. The wrapper only calls kernels, and one package reads each header once."""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> PackagedStep:
    path = tmp_path_factory.mktemp("package") / "step.pt2"
    with inductor_config.patch(CHEAPER):
        return kvcompile.package(tiny_transformer(), one_token(0), policy="int8_per_token_head", path=path)


def test_a_package_generates_the_tokens_of_the_model_on_packed_caches(step: PackagedStep) -> None:
    """Eager code on packed caches needs no second compilation; slow tests compare with the compiled model."""
    assert generate(step, PROMPT, 12) == greedy_tokens(packed_transformer(), 12)


def test_its_metadata_describe_every_input(step: PackagedStep) -> None:
    assert [one.name for one in step.signature.of_kind("argument")] == ["tokens", "input_pos"]
    keys, values = step.signature.of_kind("cache")
    assert (keys.name, keys.role, keys.format) == ("layers[0].attention.k_cache", "key", "int8_per_token_head")
    assert (values.role, values.head_dim, values.num_tokens) == ("value", 64, 512)
    assert keys.type == TensorType("uint8", (8, 1, 2, 64 * 68))
    assert step.signature.outputs == (TensorType("float32", (1, 1, VOCAB_SIZE)),)
    assert step.cache_nbytes == 2 * 8 * 2 * 64 * 68


def test_two_callers_with_their_own_caches_do_not_meet(step: PackagedStep) -> None:
    first, second = step.new_caches(), step.new_caches()
    token, position = one_token(0)
    alone = step({"tokens": token, "input_pos": position}, step.new_caches())
    step({"tokens": token + 1, "input_pos": position}, first)
    assert torch.equal(step({"tokens": token, "input_pos": position}, second)[0], alone[0])


def test_a_wrong_tensor_is_an_error_and_changes_nothing(step: PackagedStep) -> None:
    token, position = one_token(0)
    caches = step.new_caches()
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({"tokens": token}, r"step.pt2 needs the argument 'input_pos'"),
        ({"tokens": token.int(), "input_pos": position}, r"takes 'tokens' as contiguous int64 \[1, 1\] on cpu, not as"),
        ({"tokens": token.expand(2, 1), "input_pos": position}, r"not as strided int64 \[2, 1\] on cpu"),
        ({"token": token, "input_pos": position}, r"no input 'token'; did you mean 'tokens'\?"),
    ]
    for arguments, message in wrong:
        with pytest.raises(PackageError, match=message):
            step(arguments, caches)
    assert not any(cache.any() for cache in caches.values())


def test_a_position_behind_the_end_of_the_cache_is_an_error(step: PackagedStep) -> None:
    token, _ = one_token(0)
    with pytest.raises(PackageError, match=r"step.pt2 failed: .* past the end of its caches, which hold 512 tokens"):
        step({"tokens": token, "input_pos": torch.tensor([512])}, step.new_caches())


def test_a_file_that_is_no_package_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="is not a file"):
        kvcompile.load_package(tmp_path / "missing.pt2")
    (tmp_path / "text.pt2").write_text("no package")
    with pytest.raises(PackageError, match=r"text.pt2 is not a package of AOTInductor"):
        kvcompile.load_package(tmp_path / "text.pt2")


def test_the_description_of_inputs_is_read_as_it_was_written() -> None:
    cache = StepInput("keys", "cache", TensorType("uint8", (3, 1, 2, 4096)), "int4", "key", 64, 128)
    signature = Signature(
        (StepInput("length", "state", TensorType("int64", ())), cache), (TensorType("float32", (1, 1, 97)),)
    )
    assert Signature.read(signature.metadata()) == signature
    with pytest.raises(PackageError, match="not made by kvcompile"):
        Signature.read({})
    for key, value in (("input.1.kind", "cash"), ("input.0.dtype", "load"), ("outputs", "2")):
        with pytest.raises(PackageError, match="the description of the package is damaged"):
            Signature.read({**signature.metadata(), key: value})


def growing(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    return F.scaled_dot_product_attention(q, keys, values), keys, values


def without_cache(q: Tensor, k: Tensor) -> Tensor:
    return (q * k).sum()


def of_one_mask(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
    kc.index_copy_(2, torch.arange(1), k)
    vc.index_copy_(2, torch.arange(1), v)
    return F.scaled_dot_product_attention(q, kc, vc, dropout_p=0.5)


@pytest.mark.parametrize(
    ("function", "shapes", "error", "message"),
    [
        (growing, [(1, 2, 1, 64)] * 3 + [(1, 2, 5, 64)] * 2, PackageError, r"makes new caches \(growing\)"),
        (without_cache, [(1, 2, 1, 64)] * 2, PackageError, "no attention on a KV cache"),
        (of_one_mask, [(1, 2, 1, 64)] * 3 + [(1, 2, 64, 64)] * 2, UnsupportedSiteError, "dropout"),
    ],
)
def test_a_step_that_a_package_cannot_hold_is_an_error(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        kvcompile.package(function, [torch.zeros(shape) for shape in shapes], path=tmp_path / "step.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_packed_is_an_error_that_says_why(tmp_path: Path) -> None:
    model = tiny_transformer()
    view = model.layers[0].attention.k_cache[0]
    with pytest.raises(PackageError, match=r"cannot be packaged: .*a view of it, its storage, or another tensor"):
        kvcompile.package(model, one_token(0), path=tmp_path / "step.pt2")
    assert not view.any()


def test_packaging_leaves_the_caches_of_the_caller_as_they_are() -> None:
    model = tiny_transformer()
    cache = model.layers[0].attention.k_cache
    address = cache.data_ptr()
    capture(model, one_token(0), {}, "int8_per_token_head")
    assert model.layers[0].attention.k_cache is cache
    assert type(cache) is Tensor
    assert cache.data_ptr() == address


@pytest.mark.parametrize("make", [tiny_transformer, packed_transformer])
def test_a_cache_with_content_is_an_error_and_keeps_it(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    cache = model.layers[0].attention.v_cache
    with torch.no_grad():
        cache[:, :, 3] = 1
    with pytest.raises(PackageError, match=r"layers\[0\].attention.v_cache is not zero: .* with a fresh cache"):
        kvcompile.package(model, one_token(0), policy="int8_per_token_head", path=tmp_path / "step.pt2")
    assert cache[0, 0, 3, 0] == 1


def test_a_cache_that_was_packed_while_it_was_empty_is_accepted() -> None:
    model = packed_transformer()
    assert model.layers[0].attention.k_cache.packed.any()  # the scale of a vector of zeros
    captured = capture(model, one_token(0), {}, "int8_per_token_head")
    assert kinds(captured)["layers[0].attention.k_cache"] == "cache"


def kinds(captured: Captured) -> dict[str, str]:
    """The kinds of all inputs that are not constants, by name."""
    return {one.name: one.kind for one in captured.inputs if one is not None}


class CrossAttention(torch.nn.Module):
    """Attention on precomputed keys and values, which the step only reads."""

    def __init__(self, values_of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.register_buffer("keys", values_of(1, 2, 64, 32))
        self.register_buffer("values", values_of(1, 2, 64, 32))
        kvcompile.pack_(self)

    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, self.keys, self.values)


QUERY = torch.ones(1, 2, 1, 32)


def test_a_cache_of_the_module_that_the_step_only_reads_is_a_constant_unless_it_is_empty() -> None:
    filled = capture(CrossAttention(torch.randn), [QUERY], {}, "float32")
    assert kinds(filled) == {"q": "argument"}
    empty = capture(CrossAttention(torch.zeros), [QUERY], {}, "float32")
    assert kinds(empty) == {"q": "argument", "keys": "cache", "values": "cache"}


@pytest.mark.slow
@inductor_config.patch(CHEAPER)
def test_a_package_attends_to_a_cache_that_is_a_constant(tmp_path: Path) -> None:
    model = CrossAttention(torch.randn)
    expected = model(QUERY)
    step = kvcompile.package(model, [QUERY], policy="float32", path=tmp_path / "step.pt2")
    assert step.new_caches() == {}
    torch.testing.assert_close(step({"q": QUERY}, {})[0], expected)


def test_a_cache_among_the_arguments_that_the_step_only_reads_must_be_empty(tmp_path: Path) -> None:
    def step(q: Tensor, encoded: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, encoded.keys, encoded.values)

    with pytest.raises(PackageError, match=r"encoded.keys is not zero: .* or make it a constant: a buffer of the"):
        kvcompile.package(step, (QUERY, CrossAttention(torch.randn)), policy="float32", path=tmp_path / "step.pt2")


def test_the_weights_of_a_packaged_method_are_constants() -> None:
    model = tiny_transformer()
    of_method, of_module = (capture(one, one_token(0), {}, "int8_per_token_head") for one in (model.forward, model))
    assert kinds(of_method) == kinds(of_module)


def test_a_function_that_reads_weights_of_its_surroundings_is_an_error(tmp_path: Path) -> None:
    model = tiny_transformer()

    def step(tokens: Tensor, input_pos: Tensor) -> Any:
        return model(tokens, input_pos)

    with pytest.raises(PackageError, match=r"reads .*weight.*, which is not an argument; package the module that"):
        kvcompile.package(step, one_token(0), path=tmp_path / "step.pt2")


def test_calibrated_formats_are_an_error(tmp_path: Path) -> None:
    choice = {"dtype": "transform_2.6bit", "transforms": str(write_transforms(tmp_path / "t.safetensors", 64))}
    with pytest.raises(PackageError, match=r"a calibrated format.* choose another policy"):
        kvcompile.package(tiny_transformer(), one_token(0), policy={"default": choice}, path=tmp_path / "step.pt2")


def test_a_wrong_path_or_policy_is_an_error_before_any_work(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "step.so", "needs the suffix .pt2"), (tmp_path / "a" / "b.pt2", "not a folder")):
        with pytest.raises(PackageError, match=message):
            kvcompile.package(without_cache, path=path)
    with pytest.raises(kvcompile.PolicyError, match="int5"):
        kvcompile.package(without_cache, policy="int5", path=tmp_path / "step.pt2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["int8_per_token_head", "int4", "int4_per_token_head", "turboquant_3bit_nc", "fp8_e4m3"]
)
def test_every_kind_of_format_is_packaged(policy: str, tmp_path: Path) -> None:
    step = kvcompile.package(tiny_transformer(), one_token(0), policy=policy, path=tmp_path / "step.pt2")
    assert generate(step, PROMPT, 8) == expected_tokens(policy, 8)


@pytest.mark.slow
@inductor_config.patch(CHEAPER)
def test_a_prompt_of_strided_tensors_that_fills_more_than_half_of_a_cache_is_packaged(tmp_path: Path) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
        positions = length + torch.arange(40)
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        length.add_(40)
        return F.scaled_dot_product_attention(q, keys, values, torch.arange(64) <= positions[:, None])

    torch.manual_seed(0)
    new, caches = torch.randn(3, 1, 40, 2, 64).transpose(2, 3), torch.zeros(2, 1, 2, 64, 64)
    inputs = {"q": new[0], "k": new[1], "v": new[2], "keys": caches[0].clone(), "values": caches[1].clone()}
    made = kvcompile.package(
        step, kwargs={**inputs, "length": torch.zeros(1, dtype=torch.long)}, policy="float32", path=tmp_path / "p.pt2"
    )
    state = made.new_caches()
    (out,) = made({name: x.contiguous() for name, x in zip("qkv", new, strict=True)}, state)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*new, is_causal=True))
    assert state["length"].item() == 40


@pytest.mark.slow
def test_a_model_in_half_precision_is_packaged(tmp_path: Path) -> None:
    model = tiny_transformer().to(torch.bfloat16)
    step = kvcompile.package(model, one_token(0), policy="turboquant_3bit_nc", path=tmp_path / "step.pt2")
    caches = step.new_caches()
    with torch.no_grad():
        for position, token in enumerate(PROMPT):
            arguments = {"tokens": torch.tensor([[token]]), "input_pos": torch.tensor([position])}
            (logits,), expected = step(arguments, caches), model(**arguments)
            assert (logits - expected).norm() < 0.3 * expected.norm()


@pytest.mark.slow
def test_packages_of_a_prompt_and_of_a_token_share_their_caches(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=97, head_dim=32, num_hidden_layers=2, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    ids, policy = torch.tensor([PROMPT]) % 97, "int4_per_token_head"

    def package(name: str, length: int) -> PackagedStep:
        cache = kvcompile.static_cache(model, 1, 128, policy)
        inputs = {"input_ids": ids[:, :length], "past_key_values": cache}
        return kvcompile.package(model, kwargs=inputs, policy=policy, path=tmp_path / f"{name}.pt2")

    prompt, token = package("prompt", len(PROMPT)), package("token", 1)
    caches = prompt.new_caches()
    assert token.new_caches().keys() == caches.keys()
    found = [int(prompt({"input_ids": ids}, caches)[0][0, -1].argmax())]
    for _ in range(5):
        found.append(int(token({"input_ids": torch.tensor([found[-1:]])}, caches)[0][0, -1].argmax()))

    cache = kvcompile.static_cache(model, 1, 128, policy)
    with torch.no_grad():
        logits, expected = model(input_ids=ids, past_key_values=cache).logits, []
        for _ in range(6):
            expected.append(int(logits[0, -1].argmax()))
            logits = model(input_ids=torch.tensor([expected[-1:]]), past_key_values=cache).logits
    assert found == expected


@pytest.mark.slow
def test_the_example_prints_its_tokens_and_the_command_for_cpp(tmp_path: Path, capsys: Any) -> None:
    package_step.main(["--new-tokens", "2", "--output", str(tmp_path / "step.pt2")])
    shown = capsys.readouterr().out
    assert re.search(r"cache +layers\[0\].attention.k_cache +uint8 \[8, 1, 2, 4352\] int8_per_token_head", shown)
    assert re.search(r"tokens: \d+ \d+\n", shown)
    assert re.search(r"in C\+\+: g\+\+ .*packaged_step.cpp .* \./packaged_step .*step.pt2 2 \d+", shown)


@pytest.mark.slow
def test_a_program_in_cpp_generates_the_same_tokens_without_python(step: PackagedStep, tmp_path: Path) -> None:
    program = tmp_path / "packaged_step"
    subprocess.run(compile_command(program, "cpu"), check=True, capture_output=True)
    arguments = [str(program), str(step.path), "8", *map(str, PROMPT)]
    printed = subprocess.run(arguments, check=True, capture_output=True, text=True, env={}).stdout
    assert [int(token) for token in printed.split()] == generate(step, PROMPT, 8)
