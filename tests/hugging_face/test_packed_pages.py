"""``generate_batch()`` of a model that ``kvcompile.compile`` has prepared: its pages are packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile import OptionsError, PolicyError, collect_reports
from kvcompile.compat.continuous_batching import allocator_classes

transformers = pytest.importorskip("transformers")
from cheaper_compilation import skip_present_objects_in_collections  # noqa: E402
from policies import reading_packed  # noqa: E402
from tiny_llama import attention_llama  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402

pytestmark = pytest.mark.skipif(allocator_classes() is None, reason="this release of Transformers has no allocators")

LOSSLESS = {"default": {"dtype": "float32"}}
PAGE_SIZE = 64
PROMPTS = [[5, 6, 7], list(range(3, 24)), list(range(70, 0, -1)), [(7 * i) % 97 for i in range(150)]]
"""Prompts of less than a page, and of several pages."""

SHARED = [(5 * i) % 97 for i in range(2 * PAGE_SIZE)]
"""A prefix of two whole pages."""


def batched(
    model: Any, prompts: list[list[int]] = PROMPTS, max_new_tokens: int = 8, sampling: Any = None, **settings: Any
) -> list[list[int]]:
    """The new tokens of each prompt, by continuous batching."""
    config = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=-1, **(sampling or {"do_sample": False})
    )
    batching = ContinuousBatchingConfig(
        **{"num_blocks": 16, "page_size": PAGE_SIZE, "max_batch_tokens": 512, **settings}
    )
    results = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    assert all(result.error is None for result in results.values())
    assert len(results) == len(prompts) * (config.num_return_sequences or 1)
    return [result.generated_tokens for result in results.values()]


def one_by_one(model: Any, prompts: list[list[int]] = PROMPTS, max_new_tokens: int = 8) -> list[list[int]]:
    """The new tokens of each prompt, by ``generate()`` of one sequence on a packed static cache."""
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "disable_compile": True, "pad_token_id": 0}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)  # token 0 is no padding, so the mask is given
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **settings)
        answers.append(tokens[0, len(prompt) :].tolist())
    return answers


def packed(policy: Any = LOSSLESS, **changes: Any) -> Any:
    """A model whose prompts read packed tokens in static caches, too, as they do in pages."""
    return kvcompile.compile(attention_llama(**changes), policy=reading_packed(policy), on_unsupported="error")


@pytest.fixture(autouse=True, scope="module")
def cheap_collections() -> None:
    """Transformers collects garbage at the start and at the end of a run. The objects of earlier tests take longest."""
    skip_present_objects_in_collections()


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every packed paged cache that is made during the test. Its bytes are NaN or large numbers before the first write.

    The trash sectors at the beginning stay zeros, as Transformers promises.
    """
    from kvcompile.generation import generate_batch

    made: list[Any] = []
    pack = generate_batch.pack_updates

    def poison(cache: Any) -> None:
        pack(cache)
        cache.cache_tensor[2 * cache.bytes_per_sector :].fill_(255)
        made.append(cache)

    monkeypatch.setattr(generate_batch, "pack_updates", poison)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often layers attended by block tables (``pages``) and by slots."""
    from kvcompile.kernels import paged

    counts = {"pages": 0, "slots": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return counted

    for name in counts:
        monkeypatch.setattr(paged, f"_attend_{name}", counting(name, getattr(paged, f"_attend_{name}")))
    return counts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [LOSSLESS, "int8_per_token_head", "turboquant_4bit_nc", "int4_per_token_head"])
def test_packed_pages_get_the_tokens_of_a_packed_static_cache(policy: Any, caches: list[Any], calls: Any) -> None:
    model = packed(policy)
    expected = one_by_one(model)
    assert batched(model) == expected
    assert calls["pages"]
    assert calls["slots"]
    assert caches[0].cache_tensor.dtype == torch.uint8


def test_lossless_pages_get_the_tokens_of_plain_pages() -> None:
    model = attention_llama()
    plain = batched(model)
    assert batched(kvcompile.compile(model, policy=LOSSLESS)) == plain


@pytest.mark.parametrize("settings", [{"max_blocks_per_request": 0}, {"max_batch_tokens": 64}], ids=["slots", "chunks"])
def test_steps_without_block_tables_and_chunks_of_prompts_get_the_same_tokens(settings: Any, calls: Any) -> None:
    model = packed(num_layers=1)
    assert batched(model, **settings) == one_by_one(model)
    assert calls["slots"]
    assert bool(calls["pages"]) == ("max_blocks_per_request" not in settings)


def test_more_requests_than_fit_reuse_the_pages_of_others(caches: list[Any]) -> None:
    model = packed("int8_per_token_head", num_layers=1)
    prompts = [[(i * j) % 97 for j in range(40 + 20 * i)] for i in range(1, 7)]
    assert batched(model, prompts, max_new_tokens=40, num_blocks=2, max_batch_tokens=256) == one_by_one(
        model, prompts, max_new_tokens=40
    )
    needed = sum(-(-(len(prompt) + 40) // PAGE_SIZE) for prompt in prompts)
    (pool,) = caches[0].cache_allocators.values()
    assert pool.num_blocks < needed


def test_requests_with_a_common_prefix_share_its_pages(caches: list[Any]) -> None:
    model, prompts = packed("int8_per_token_head", num_layers=1), [[*SHARED, 3, 4, 5], [*SHARED, *[9] * 30]]
    expected = [*one_by_one(model, prompts), *one_by_one(model, prompts[:1])]
    matched: list[int] = []
    from transformers.generation.continuous_batching import PagedAttentionCache

    search = PagedAttentionCache.search_prefix_match

    def remember(self: Any, *args: Any) -> int:
        matched.append(search(self, *args))
        return matched[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedAttentionCache, "search_prefix_match", remember)
        tokens = batched(model, [*prompts, prompts[0]], max_batch_tokens=160)  # one prompt at a time
    assert tokens == expected
    assert len(SHARED) in matched


def test_forked_requests_get_copies_of_packed_pages() -> None:
    model = packed("int8_per_token_head", num_layers=1)
    greedy = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    twice = [tokens for tokens in one_by_one(model) for _ in range(2)]
    assert batched(model, sampling=greedy) == twice


def test_sliding_windows_are_packed_and_their_tokens_overwritten(caches: list[Any]) -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, sliding_window=32, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    expected = one_by_one(model, max_new_tokens=40)
    kvcompile.compile(model, policy=LOSSLESS)
    for max_batch_tokens in (16, 512):
        assert batched(model, max_new_tokens=40, max_batch_tokens=max_batch_tokens) == expected
    assert set(caches[0].cache_allocators) == {"sliding_attention", "full_attention"}
    assert model.config._attn_implementation == "eager"


def test_layers_may_have_different_formats() -> None:
    rules = [{"match": {"layers": "0"}, "dtype": "auto"}, {"match": {"layers": "1"}, "dtype": "int8_per_token_head"}]
    model = kvcompile.compile(
        attention_llama(), policy={"rules": rules, "default": {"dtype": "float32"}}, on_unsupported="error"
    )
    assert batched(model) == one_by_one(model)


@pytest.mark.parametrize(("policy", "at_least"), [("int8_per_token_head", 3.7), ("int4_per_token_head", 7.0)])
def test_the_same_memory_holds_more_pages(policy: str, at_least: float, caches: list[Any]) -> None:
    batched(packed(LOSSLESS, num_layers=1), num_blocks=32)
    batched(packed(policy, num_layers=1), num_blocks=32)
    plain, smaller = (next(iter(cache.cache_allocators.values())) for cache in caches)
    assert caches[1].cache_tensor.nbytes <= caches[0].cache_tensor.nbytes
    assert smaller.num_blocks / plain.num_blocks > at_least
    assert smaller.num_blocks == -(-32 * plain.bytes_per_block // smaller.bytes_per_block)  # Transformers rounds up


def test_the_memory_planner_turns_the_smaller_bytes_into_pages(
    caches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching import cache

    monkeypatch.setattr(
        cache, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), 64 << 20, 0, 0)
    )  # 64 MiB
    settings = {"num_blocks": None, "max_memory_percent": 0.5, "max_batch_tokens": 128}
    for policy in (LOSSLESS, "int4_per_token_head"):
        batched(packed(policy, num_layers=8), PROMPTS[:2], max_new_tokens=2, **settings)
    plain, smaller = (next(iter(made.cache_allocators.values())).num_blocks for made in caches)
    reserved = 2 * 2 * 64 * 4  # bytes for each token that attention reads, which Transformers reserves
    token = [made.bytes_per_sector / made.tokens_per_sector + reserved for made in caches]
    assert smaller / plain == pytest.approx(token[0] / token[1], rel=0.05)


def test_several_runs_and_persistent_managers_serve_one_model(caches: list[Any]) -> None:
    model = packed("int8_per_token_head", num_layers=1)
    expected = one_by_one(model)
    assert batched(model) == batched(model) == expected
    batching = ContinuousBatchingConfig(num_blocks=16, page_size=PAGE_SIZE, max_batch_tokens=512)
    config = transformers.GenerationConfig(max_new_tokens=8, eos_token_id=-1, do_sample=False)
    for _ in range(2):
        results = model.generate_batch(PROMPTS, config, batching, persistent_manager=True)
        assert [result.generated_tokens for result in results.values()] == expected
    assert len(caches) == 3
    assert one_by_one(model) == expected


def test_uncompile_gives_plain_pages_back(caches: list[Any]) -> None:
    model = packed("int8_per_token_head")
    config = transformers.GenerationConfig(max_new_tokens=2, eos_token_id=-1, do_sample=False)
    batching = ContinuousBatchingConfig(num_blocks=16, page_size=PAGE_SIZE, max_batch_tokens=512)
    model.generate_batch(PROMPTS, config, batching, persistent_manager=True)
    kvcompile.uncompile(model)
    assert batched(model) == batched(attention_llama())
    assert len(caches) == 1


def test_plain_models_keep_plain_pages_beside_packed_ones(caches: list[Any]) -> None:
    plain, compiled = attention_llama(), packed("int4_per_token_head")
    before = batched(plain)
    batched(compiled)
    assert batched(plain) == before
    assert len(caches) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_steps_have_no_graph_breaks_and_get_the_same_tokens() -> None:
    model = packed("int8_per_token_head", num_layers=1)
    expected = one_by_one(model)
    config = transformers.CompileConfig(backend="aot_eager", mode=None, dynamic=True, fullgraph=True)
    assert batched(model, varlen_compile_config=config, decode_compile_config=config) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_formats_that_keep_tokens_exactly_are_refused() -> None:
    policy = {"default": {"dtype": "int4_per_token_head"}, "residual_length": 64}
    with pytest.raises(PolicyError, match="generate_batch: layer 0: pages cannot keep tokens in full precision"):
        batched(packed(policy))


def test_by_default_a_refused_format_leaves_pages_plain_and_the_report_says_why(caches: list[Any]) -> None:
    policy = {"default": {"dtype": "int4_per_token_head"}, "residual_length": 64}
    model = kvcompile.compile(attention_llama(), policy=policy)
    with collect_reports() as report:
        kvcompile.compile(model, policy=policy)
        model.init_continuous_batching(transformers.GenerationConfig(eos_token_id=-1))
    assert any("full precision" in note for note in report.notes)
    assert not caches


def test_a_page_must_hold_whole_blocks() -> None:
    with pytest.raises(OptionsError, match="page_size is 100; set page_size=128"):
        batched(packed(), page_size=100)


def test_a_model_that_does_not_pass_keywords_on_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    from kvcompile.caches import pages

    model = packed()
    batched(model, PROMPTS[:1])
    monkeypatch.setitem(
        AttentionInterface._global_mapping,
        pages.ATTENTION,
        lambda module, q, *args, **kwargs: (q.transpose(1, 2), None),
    )
    with pytest.raises(AssertionError):
        batched(model, PROMPTS[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"max_blocks_per_request": 0}, {"max_batch_tokens": 64}])
def test_lossless_pages_on_a_gpu_get_the_tokens_of_a_packed_static_cache(
    settings: Any, caches: list[Any], calls: Any
) -> None:
    model = packed(device="cuda")
    assert batched(model, **settings) == one_by_one(model)
    assert caches[0].cache_tensor.is_cuda
    assert calls["pages"] or calls["slots"]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["int8_per_token_head", "int4_per_token_head", "turboquant_4bit_nc"])
def test_quantized_pages_on_a_gpu_get_nearly_all_tokens_of_a_packed_static_cache(
    policy: str, caches: list[Any]
) -> None:
    """Rounding on the way to a cache may exchange two tokens that are almost equally likely."""
    model = packed(policy, device="cuda")
    pairs = list(zip(batched(model), one_by_one(model), strict=True))
    assert caches[0].cache_tensor.is_cuda
    assert sum(tokens == expected for tokens, expected in pairs) >= 3
