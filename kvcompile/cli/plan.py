"""``kvcompile plan``: how many users and tokens fit, and the context from which packing is faster. Nothing is run."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from kvcompile.cli.output import NEGATIVE, JsonOption, examples, print_error, print_json, print_wrapped
from kvcompile.errors import shown
from kvcompile.planning.errors import NoRoomError, PlanError
from kvcompile.planning.units import parse_context, parse_rate, parse_size

EXAMPLES = examples(
    "plan --config config.json --kv-budget 74GiB",
    "plan --config . --memory 80GiB --weights int4 --reserve 2GiB --contexts 32k",
    "plan --config . --kv-budget 74GiB --policies bf16,policy.yaml --explain",
    "plan --config . --memory 80GiB --bandwidth h100-sxm --users 8 --speedup 2",
    "plan --config . --memory 80GiB --tensor-parallel 2 --context-parallel 4",
)

RESERVE = "2GiB"
SPEEDUP = Fraction(3, 2)

MAX_ITEMS = 100
"""The maximum number of items of a list."""

_NUMBER = re.compile(r"[0-9]{1,15}(/[0-9]{1,15}|(\.[0-9]{1,15})?(e[+-]?[0-9]{1,2})?)")
"""A number whose exact value is short. It excludes ``1e999999999``, which has a billion digits."""

Config = Annotated[
    Path, typer.Option(metavar="PATH", help="The model's Hugging Face config.json, or the directory that holds it.")
]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Total memory of a GPU, e.g. 80GiB.")]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FORMAT|SIZE",
        help="The format of the weights (fp32, bf16, fp16, fp8, int8, int4, mxfp4, nvfp4), or their size.  "
        "[default: the model's dtype]",
    ),
]
Reserve = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help=f"Memory for everything else: activations, CUDA, fragmentation.  [default: {RESERVE}]"
    ),
]
KvBudget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory for KV caches alone, in place of --memory and --reserve.")
]
Contexts = Annotated[str, typer.Option(metavar="LIST", help="Tokens of every user; k is 1024.")]
Policies = Annotated[
    str,
    typer.Option(metavar="LIST", help="bf16, fp16, fp32, presets, policy files; the first one is the baseline."),
]
SourceTokens = Annotated[
    str | None, typer.Option(metavar="TOKENS", help="Tokens of the encoder, in an encoder-decoder model.")
]
BandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--bandwidth", metavar="RATE|DEVICE", help="Predict decode times: memory bandwidth, as 4.35TB/s or h100-sxm."
    ),
]
Users = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="With --bandwidth: sequences in a decode step.  [default: 1]")
]
Speedup = Annotated[
    str | None,
    typer.Option(
        metavar="FACTOR",
        help="With --bandwidth: find the context from which a step is FACTOR times as fast.  [default: 1.5]",
    ),
]
Efficiency = Annotated[
    str | None,
    typer.Option(
        metavar="SHARES",
        help="With --bandwidth: the share of the bandwidth that kernels reach, as 0.9 or bf16=0.95,weights=0.9.  "
        "[default: 1, which no kernel reaches]",
    ),
]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel", metavar="N", min=1, help="GPUs that divide the heads and the weights.")
]
ContextParallel = Annotated[
    int, typer.Option("--context-parallel", metavar="N", min=1, help="GPUs that divide the tokens of packed caches.")
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="With --bandwidth and several GPUs: bytes per second that a GPU receives.  [default: 450GB/s, NVLink]",
    ),
]
Latency = Annotated[
    str | None,
    typer.Option(
        metavar="MICROSECONDS",
        help="With --bandwidth and several GPUs: the time of a small collective.  [default: 10]",
    ),
]
Explain = Annotated[bool, typer.Option("--explain", help="Also print the formulas.")]


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(plan)


def plan(
    config: Config,
    memory: Memory = None,
    weights: WeightsOption = None,
    reserve: Reserve = None,
    kv_budget: KvBudget = None,
    contexts: Contexts = "2k,8k,32k,128k",
    policies: Policies = "bf16,int8_per_token_head,int4_per_token_head",
    source_tokens: SourceTokens = None,
    bandwidth: BandwidthOption = None,
    users: Users = None,
    speedup: Speedup = None,
    efficiency: Efficiency = None,
    tensor_parallel: TensorParallel = 1,
    context_parallel: ContextParallel = 1,
    link: Link = None,
    latency: Latency = None,
    explain: Explain = False,
    as_json: JsonOption = False,
) -> None:
    """Print how many users and tokens fit under each policy. Reads a model's config and runs nothing."""
    from kvcompile.cli.plan_text import explanation, summary
    from kvcompile.planning.devices import read_bandwidth
    from kvcompile.planning.make_plan import make_plan
    from kvcompile.planning.plan import Request
    from kvcompile.planning.ranks import LATENCY, LINK, Ranks

    _forbid("together with --kv-budget", kv_budget is not None, **{"--memory": memory, "--reserve": reserve})
    _forbid(
        "without --bandwidth", not bandwidth, **{"--users": users, "--speedup": speedup, "--efficiency": efficiency}
    )
    ranks = Ranks(
        tensor_parallel,
        context_parallel,
        parse_rate(link, "--link") if link else LINK,
        _number(latency, "--latency") / 10**6 if latency else LATENCY,
    )
    exchanges = bool(bandwidth) and ranks.count > 1
    _forbid("without --bandwidth and several GPUs", not exchanges, **{"--link": link, "--latency": latency})
    request = Request(
        config=config,
        policies=_items(policies, "--policies"),
        contexts=tuple(parse_context(item, "--contexts") for item in _items(contexts, "--contexts")),
        memory=parse_size(memory, "--memory") if memory else None,
        weights=weights,
        reserve=parse_size(reserve or RESERVE, "--reserve"),
        kv_budget=parse_size(kv_budget, "--kv-budget") if kv_budget else None,
        source_tokens=parse_context(source_tokens, "--source-tokens") if source_tokens else None,
        bandwidth=read_bandwidth(bandwidth) if bandwidth else None,
        users=users or 1,
        speedup=_number(speedup, "--speedup") if speedup else SPEEDUP,
        efficiency=_shares(efficiency) if efficiency else {},
        ranks=ranks,
    )
    try:
        result = make_plan(request)
    except NoRoomError as error:
        print_error(str(error))
        raise typer.Exit(NEGATIVE) from None
    if as_json:
        print_json(result.to_dict())
        return
    if explain:
        print(explanation(result), end="\n\n")
    print(summary(result))
    for note in result.notes:
        print_wrapped(f"note: {note}", indent=6)


def _forbid(circumstance: str, holds: bool, **options: object) -> None:
    """Raise PlanError if one of ``options`` was given although it has no effect under ``circumstance``."""
    given = [name for name, value in options.items() if value is not None]
    if holds and given:
        raise PlanError(f"{given[0]} has no effect {circumstance}: drop it")


def _items(text: str, option: str) -> tuple[str, ...]:
    """The items of a comma-separated list, each once."""
    items = tuple(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))
    if not items:
        raise PlanError(f"{option}: {text!r} is an empty list; leave the option out for its default")
    if len(items) > MAX_ITEMS:
        raise PlanError(f"{option}: {shown(text)} has {len(items)} items; give at most {MAX_ITEMS}")
    return items


def _number(text: str, option: str) -> Fraction:
    """A positive number, exactly as it is written: ``1.5``, ``2/3`` or ``1e-3``."""
    try:
        number = Fraction(text) if _NUMBER.fullmatch(text) else Fraction(0)
    except ZeroDivisionError:
        number = Fraction(0)
    if number <= 0:
        raise PlanError(f"{option}: {shown(text)} is not a positive number, such as 1.5")
    return number


def _shares(text: str) -> dict[str, Fraction]:
    """The efficiency of a ``DecodeModel`` from ``0.9`` or ``bf16=0.95,weights=0.9``."""
    shares = {}
    for item in _items(text, "--efficiency"):
        name, equals, share = item.rpartition("=")
        shares[name if equals else "all"] = _number(share, "--efficiency")
    if max(shares.values()) > 1:
        raise PlanError(f"--efficiency: {text!r}: a share of the bandwidth is at most 1")
    return shares
