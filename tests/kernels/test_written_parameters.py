"""Each launcher names exactly the parameters that its kernel writes. Packages rely on the names."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from aot_compilation import CPU, INT8, RESIDUAL, CompileOnly, stand_ins
from packed_bytes import empty_packed

from kvcompile.kernels import launch
from kvcompile.kernels.attention import launch_prefill, new_tokens
from kvcompile.kernels.gather import kernel as gather_kernel
from kvcompile.kernels.lang.triton import INTERPRETED
from kvcompile.kernels.latent import launch as launch_latent
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.key_factors import KeyFactors
from kvcompile.kernels.spec.new_tokens import NewTokens
from kvcompile.kernels.store import launch as launch_store

pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")]

MODULES = (launch, launch_store, launch_prefill, launch_latent, gather_kernel, new_tokens)
DECLARED = {
    name.removeprefix("launch_"): value.writes
    for module in MODULES
    for name, value in vars(module).items()
    if name.startswith("launch_") and hasattr(value, "writes")
}


CHANNEL = "int4_per_channel" + RESIDUAL
LATENTS = PackedLayout.parse("fp8_ds_mla", "key", 576)

POINTER_OPERATION = re.compile(
    r"\s*(%\w+) = (?:tt\.(?:addptr|splat|broadcast|expand_dims|reshape|bitcast|trans)|arith\.select %\w+,) (%\w+)(.*)"
)


def written_parameters(ttir: str) -> set[str]:
    """The parameters of a kernel that it, or a function that it calls, stores to."""
    kernel, *functions = re.split(r"(?m)^  tt\.func private ", ttir[ttir.index("tt.func public") :])
    called = {}
    for function in functions:
        written = written_in(function, {})
        names = re.findall(r"(%\w+): ", function.split("\n", 1)[0])
        called[function[: function.index("(")]] = [place for place, name in enumerate(names) if name in written]
    return {name.removeprefix("%") for name in written_in(kernel, called)}


def written_in(function: str, called: dict[str, list[int]]) -> set[str]:
    """The parameters that one function stores to; ``called`` has the places of such parameters of other functions."""
    bases = {name: {name} for name in re.findall(r"(%\w+): !tt.ptr", function.split("\n", 1)[0])}
    written, results = set(), {}
    for line in function.splitlines():
        indent = len(line) - len(line.lstrip())
        if match := POINTER_OPERATION.match(line):
            others = re.findall(r"%\w+", match[3]) if "select" in line else []
            bases[match[1]] = set().union(*(bases.get(name, set()) for name in (match[2], *others)))
        elif match := re.match(r"\s*(%\w+) = scf\.if .*!tt\.ptr", line):
            results[indent] = match[1]
            bases[match[1]] = set()
        elif match := re.match(r"\s*scf\.yield (%\w+) : !tt\.ptr", line):
            bases[results[indent - 2]] |= bases[match[1]]
        elif match := re.search(r"tt\.call (@[^(]+)\((.*?)\)", line):
            arguments = match[2].split(", ")
            written |= set().union(*(bases[arguments[place]] for place in called[match[1]]))
        elif match := re.match(r"\s*(?:%\w+ = )?tt\.(?:store|atomic\w+)[^%]* (%\w+)", line):
            assert bases[match[1]], f"unknown pointer: {line}"
            written |= bases[match[1]]
        for inner, outer in re.findall(r"(%\w+) = (%\w+)", line):  # values that a loop carries
            bases[inner] = bases.get(outer, set())
    return written


def attend(key: str, q_len: int, *, lse: torch.Tensor | None = None, head_dim: int = 64) -> None:
    value = key.replace("channel", "token_head")
    layouts = PackedLayout.parse(key, "key", head_dim), PackedLayout.parse(value, "value", head_dim)
    data = [empty_packed(layout, 300, 1, 2, CPU) for layout in layouts]
    query, mask = torch.zeros(1, 4, q_len, head_dim, dtype=torch.bfloat16), torch.ones(1, 1, q_len, 300).bool()
    launch.attention(query, *data, mask, None, 300, False, 0.1, 0.0, key, value, head_dim, out_lse=lse)


def attend_with_factors() -> None:
    data = [empty_packed(PackedLayout.parse(INT8, role, 64), 300, 1, 2, CPU) for role in ("key", "value")]
    query = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    factors = KeyFactors(query.clone(), torch.zeros(2, 300, 64, dtype=torch.bfloat16))
    launch.attention(query, *data, None, None, 300, False, 0.1, 0.0, INT8, INT8, 64, key_factors=factors)


def attend_to_new_tokens() -> None:
    data = [empty_packed(PackedLayout.parse(INT8, role, 64), 300, 1, 2, CPU) for role in ("key", "value")]
    query = torch.zeros(1, 4, 130, 64, dtype=torch.bfloat16)
    new = [NewTokens(torch.zeros(1, 2, 130, 64, dtype=torch.bfloat16), torch.arange(130)) for _ in data]
    launch.attention(query, *data, None, None, 300, False, 0.1, 0.0, INT8, INT8, 64, new_keys=new[0], new_values=new[1])


def attend_latents() -> None:
    data, query = empty_packed(LATENTS, 300, 1, 1, CPU), torch.zeros(1, 16, 1, 576, dtype=torch.float32)
    launch.attention(query, data, None, None, None, 300, False, 0.1, 0.0, LATENTS.spec, LATENTS.spec, 576)


def store_latents() -> None:
    data, x = empty_packed(LATENTS, 300, 1, 1, CPU), torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16)
    launch.store(data, x, torch.arange(1), None, LATENTS.spec, "key")


def store(key: str, num_tokens: int, *, pair: bool, head_dim: int = 64) -> None:
    value = key.replace("channel", "token_head")
    layouts = PackedLayout.parse(key, "key", head_dim), PackedLayout.parse(value, "value", head_dim)
    data = [empty_packed(layout, 640, 1, 2, CPU) for layout in layouts]
    x, positions = torch.zeros(1, 2, num_tokens, head_dim, dtype=torch.bfloat16), torch.arange(num_tokens)
    if pair:
        launch.store_pair(*data, x, x.clone(), positions, None, key, value)
    else:
        launch.store(data[0], x, positions, None, key, "key")


def store_header() -> None:
    layout, x = PackedLayout.parse(CHANNEL, "key", 64), torch.zeros(1, 2, 300, 64)
    launch_store.store_header(empty_packed(layout, 300, 1, 2, CPU), x, torch.tensor(1), layout)


def gather() -> None:
    layout = PackedLayout.parse(INT8, "key", 64)
    gather_kernel.gather(empty_packed(layout, 640, 1, 2, CPU), layout, torch.zeros(1, 70, dtype=torch.int64))


def test_a_launcher_names_the_parameters_that_its_kernel_writes(monkeypatch) -> None:
    kernels = stand_ins(CompileOnly, 90, monkeypatch)
    attend(INT8, 1)
    attend(INT8, 130)
    attend(CHANNEL, 1, lse=torch.zeros(1, 4, 1, 2))
    attend_with_factors()
    attend_to_new_tokens()
    attend_latents()
    for key, num_tokens in ((INT8, 1), (CHANNEL, 1), (CHANNEL, 600)):
        store(key, num_tokens, pair=True)
        store(key, num_tokens, pair=False)
    gather()
    store_header()
    store_latents()
    written = {
        name: set().union(*(written_parameters(version.asm["ttir"]) for version in versions))
        for name, versions in kernels.items()
        if name in DECLARED and name != "hopper_latent_attention"  # Gluon has no such text
    }
    assert written == {name: set(names) for name, names in DECLARED.items() if name != "hopper_latent_attention"}
    assert DECLARED["hopper_latent_attention"] == DECLARED["latent_attention"]
