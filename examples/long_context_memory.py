"""The memory of KV caches by context and policy, as a table and optionally as a plot.

    python examples/long_context_memory.py
    python examples/long_context_memory.py --config model/config.json --plot memory.png

No model runs: the planner calculates from a model's config, by default the config of Llama 3.1 8B. The plot needs
Matplotlib (``pip install matplotlib``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kvcompile.planning.make_plan import make_plan
from kvcompile.planning.plan import Plan, Request
from kvcompile.planning.units import format_context

GIB = 2**30
POLICIES = ("bf16", "int8_per_token_head", "int4_per_token_head", "turboquant_3bit_nc")
CONTEXTS = tuple(2**power for power in range(11, 18))
LLAMA_3_1_8B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def plan_for(config: Path | None, policies: Sequence[str]) -> Plan:
    """The plan for a model's ``config.json``; None means Llama 3.1 8B."""
    with tempfile.TemporaryDirectory() as folder:
        if config is None:
            config = Path(folder, "config.json")
            config.write_text(json.dumps(LLAMA_3_1_8B))
        return make_plan(Request(config, tuple(policies), CONTEXTS, kv_budget=80 * GIB))


def gibibytes(plan: Plan) -> dict[str, list[float]]:
    """The GiB of one user's caches for every context, in whole blocks and with scales, by policy."""
    return {
        policy.caches.policy: [policy.capacity["allocated"].bytes_per_user[context] / GIB for context in CONTEXTS]
        for policy in plan.policies
    }


def print_table(sizes: dict[str, list[float]]) -> None:
    table = Table("tokens", *map(format_context, CONTEXTS), box=box.SIMPLE, title="GiB of KV caches of one user")
    for policy, values in sizes.items():
        table.add_row(policy, *(f"{value:.2f}" for value in values))
    Console(width=100).print(table)


def plot(sizes: dict[str, list[float]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained")
    for policy, values in sizes.items():
        axes.plot(CONTEXTS, values, marker="o", label=policy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(CONTEXTS, map(format_context, CONTEXTS))
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("GiB of KV caches of one user")
    axes.legend()
    figure.savefig(path)
    print(f"plot written to {path}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a model's config.json, or its folder")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="presets, files, bf16, fp16 or fp32")
    parser.add_argument("--plot", type=Path, help="file for a plot")
    options = parser.parse_args(arguments)
    sizes = gibibytes(plan_for(options.config, options.policies))
    print_table(sizes)
    if options.plot is not None:
        plot(sizes, options.plot)


if __name__ == "__main__":
    main()
