"""``generate_batch()``, the continuous batching of Transformers, runs on packed pools if Transformers compiles it."""

from __future__ import annotations

from typing import Any

import pytest

from kvcompile import collect_reports

transformers = pytest.importorskip("transformers")
from packaging.version import Version  # noqa: E402
from tiny_llama import tiny_llama  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402

PROMPTS = [[5, 6, 7], list(range(3, 24)), list(range(60, 20, -1))]
LOSSLESS = {"default": {"dtype": "float32"}}
FORKED = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
"""Two requests with one prompt, whose blocks are copied. Sampling from the top token alone is greedy."""

OUTSIDE_OF_GRAPHS = Version(transformers.__version__) >= Version("5.18")
"""Transformers disables compilation of paged attention since version 5.18."""

implementations = pytest.mark.parametrize("implementation", ["sdpa", "paged|eager"])
skip_outside_of_graphs = pytest.mark.skipif(OUTSIDE_OF_GRAPHS, reason="Transformers compiles no paged attention")


def generated(
    model: Any, compile_config: Any = None, prompts: list[list[int]] = PROMPTS, **arguments: Any
) -> list[list[int]]:
    config = transformers.GenerationConfig(**{"max_new_tokens": 6, "eos_token_id": -1, **arguments})
    batching = ContinuousBatchingConfig(
        num_blocks=32, block_size=16, max_batch_tokens=32, varlen_compile_config=compile_config
    )
    results = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    assert all(result.error is None for result in results.values())
    return [results[request].generated_tokens for request in sorted(results)]


def kvquant(policy: Any) -> Any:
    return transformers.CompileConfig(backend="kvquant", mode=None, dynamic=True, options={"policy": policy})


@skip_outside_of_graphs
@implementations
@pytest.mark.parametrize("arguments", [{"do_sample": False}, FORKED], ids=["alone", "forked"])
@pytest.mark.usefixtures("without_code_generation")
def test_requests_that_share_packed_pools_get_the_tokens_of_plain_ones(
    implementation: str, arguments: dict[str, Any]
) -> None:
    model = tiny_llama()
    model.set_attn_implementation(implementation)
    with collect_reports() as report:
        compiled = generated(model, kvquant(LOSSLESS), **arguments)
    assert report.totals.rewritten == report.totals.sites > 0
    assert not report.notes
    assert compiled == generated(model, **arguments)


@pytest.mark.skipif(not OUTSIDE_OF_GRAPHS, reason="Transformers compiles paged attention")
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "paged|eager"])
@pytest.mark.usefixtures("without_code_generation")
def test_where_paged_attention_is_outside_of_graphs_the_user_is_told(implementation: str) -> None:
    model = tiny_llama(num_layers=1)
    short: Any = {"prompts": PROMPTS[:2], "max_new_tokens": 2, "do_sample": False}
    model.set_attn_implementation(implementation)
    with collect_reports() as report:
        compiled = generated(model, kvquant(LOSSLESS), **short)
    assert report.totals.rewritten == 0
    sites = [site for graph in report.graphs for site in graph.sites]
    assert all(site.reason for site in sites)
    assert sites or "graph breaks" in report.notes[0]
    assert compiled == generated(model, **short)


@skip_outside_of_graphs
@pytest.mark.gpu
def test_kernels_serve_requests_that_share_packed_pools() -> None:
    model = tiny_llama(device="cuda")
    model.set_attn_implementation("sdpa")
    plain = generated(model, do_sample=False)
    with collect_reports() as report:
        compiled = generated(model, kvquant("int8_per_token_head"), do_sample=False)
    assert report.totals.rewritten == report.totals.sites > 0
    same = [a == b for tokens, others in zip(compiled, plain, strict=True) for a, b in zip(tokens, others, strict=True)]
    assert sum(same) > 0.7 * len(same)
