"""Compile every kernel for GPUs that do not exist, and read the resources that it takes.

    python tests/support/aot_devices.py ROWS [--gpus 89 gfx942] [--part 1/10]

The command compiles all kernels of all formats and head_dims. It appends a line for each case to the file ROWS, skips
cases that ROWS has, and writes a summary of all lines to docs/kernels_by_gpu.json, from which docs/compatibility.md is
made. Processes with other parts may append to the same file. ``tests/kernels/test_aot_devices.py`` compiles some cases.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from aot_compilation import CPU, GPUS, RESIDUAL, CompileOnly, stand_ins
from packed_bytes import empty_packed

from kvcompile.kernels import launch
from kvcompile.kernels.attention.configs import attention_config
from kvcompile.kernels.deepseek_v4 import kernels as deepseek_v4
from kvcompile.kernels.formats import FORMATS, ds_mla_rows
from kvcompile.kernels.gather import kernel as gather_kernel
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.new_tokens import NewTokens

PAGE = Path(__file__).parents[2] / "docs" / "kernels_by_gpu.json"
HEAD_DIMS = (64, 96, 128, 256)
WORDS = ("uniform_4321", "uniform_5421", "uniform_6433", "uniform_42")
"""Formats of words, in which calibrated formats store their vectors."""

PAIRS = (
    *((name + RESIDUAL, name.replace("channel", "token_head")) for name in FORMATS if "channel" in name),
    *((name, name) for name in (*FORMATS, *WORDS) if "channel" not in name),
    ("int4_per_token_head" + RESIDUAL, "int4_unrotated" + RESIDUAL),
    ("turboquant_4bit" + RESIDUAL, "turboquant_4bit" + RESIDUAL),
    ("turboquant_3bit" + RESIDUAL, "turboquant_3bit" + RESIDUAL),
    ("int8_per_token_head", "turboquant_4bit"),
    ("turboquant_3bit", "int4_unrotated"),
)
"""Formats of keys and values: each format alone, presets with two formats, and formats with tokens in full
precision."""

KV_LEN = 1000
RESERVED = 1 << 10
"""Bytes of shared memory that a GPU reserves for each program."""
MOST_SPILLED = {"step": 384, "float32 step": 4096, "prompt": 256, "float32 prompt": 1200, "store": 512, "latents": 64}
"""Bytes of a thread that kernels of a call may keep in memory; 0 for other calls."""
MOST_SPILLED_IN_WIDE_HEADS = 1024
"""The same for 256 channels, whose rotation, or whose scales of groups, need more registers than there are."""


class Resources(NamedTuple):
    """The resources that a compiled kernel takes.

    Attributes:
        kernel: its name.
        threads: threads of a program.
        registers: registers of a thread.
        shared: bytes of shared memory of a program.
        spilled: bytes of a thread that lie in memory instead of registers.
        programs: programs for which a multiprocessor must have room at once.
    """

    kernel: str
    threads: int
    registers: int
    shared: int
    spilled: int
    programs: int = 1

    @classmethod
    def of(cls, kernel: Any, programs: int = 1) -> Resources:
        metadata = kernel.metadata
        read = _read_cubin if "cubin" in kernel.asm else _read_amdgcn
        registers, spilled = read(kernel)
        return cls(
            metadata.name, metadata.target.warp_size * metadata.num_warps, registers, metadata.shared, spilled, programs
        )


def _read_cubin(kernel: Any) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(kernel.asm["cubin"])
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run(
            [str(program), "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True
        ).stdout
    ((registers, stack),) = re.findall(rf"Function {kernel.metadata.name}:\s+REG:(\d+) STACK:(\d+)", text)
    return int(registers), int(stack)


def _read_amdgcn(kernel: Any) -> tuple[int, int]:
    code = kernel.asm["amdgcn"]
    names = ".vgpr_count", ".private_segment_fixed_size"
    registers, scratch = (re.search(rf"{re.escape(name)}:\s+(\d+)", code) for name in names)
    return int(registers[1]), int(scratch[1])


def compile_step(key: str, value: str, head_dim: int) -> None:
    """A decode step with a mask."""
    layouts, data = _caches(key, value, head_dim)
    query = torch.zeros(1, 8, 1, head_dim, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, KV_LEN, dtype=torch.bool)
    launch.attention(query, *data, mask, None, KV_LEN, False, 0.1, 0.0, *(x.spec for x in layouts), head_dim)


def compile_float32_step(key: str, value: str, head_dim: int) -> None:
    """A decode step with a query in float32."""
    layouts, data = _caches(key, value, head_dim)
    query = torch.zeros(1, 8, 1, head_dim)
    launch.attention(query, *data, None, None, KV_LEN, False, 0.1, 0.0, *(x.spec for x in layouts), head_dim)


def compile_prompt(key: str, value: str, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """A causal prompt, which attends to its own tokens exactly."""
    layouts, data = _caches(key, value, head_dim)
    new = NewTokens(torch.zeros(1, 2, 64, head_dim, dtype=dtype), torch.arange(64))
    query = torch.zeros(1, 8, 64, head_dim, dtype=dtype)
    launch.attention(
        query, *data, None, None, KV_LEN, True, 0.1, 0.0, *(x.spec for x in layouts), head_dim,
        new_keys=new, new_values=new,
    )  # fmt: skip


compile_float32_prompt = functools.partial(compile_prompt, dtype=torch.float32)


def compile_stores(key: str, value: str, head_dim: int) -> None:
    """Writes of one token and of many."""
    layouts, data = _caches(key, value, head_dim)
    for tokens in (1, 100):
        x = torch.zeros(2, 1, 2, tokens, head_dim, dtype=torch.bfloat16)
        launch.store_pair(*data, *x, torch.arange(tokens), None, *(layout.spec for layout in layouts))


def compile_gathers(key: str, value: str, head_dim: int) -> None:
    """The gathering of tokens of a paged cache, which has no tokens in full precision."""
    layouts, data = _caches(key, value, head_dim)
    for layout, x in zip(layouts, data, strict=True):
        if layout.residual is None:
            gather_kernel.gather(x, layout, torch.zeros(2, 100, dtype=torch.int64))


def _caches(key: str, value: str, head_dim: int) -> tuple[list[PackedLayout], list[torch.Tensor]]:
    layouts = [PackedLayout.parse(key, "key", head_dim), PackedLayout.parse(value, "value", head_dim)]
    return layouts, [empty_packed(layout, KV_LEN, 1, 2, CPU) for layout in layouts]


def compile_latents() -> None:
    """Attention of 16 and of 128 heads on latents, and a write."""
    layout = PackedLayout("fp8_ds_mla", "key", 512)
    data = empty_packed(layout, KV_LEN, 1, 1, CPU)
    for num_heads in (16, 128):
        query = torch.zeros(1, num_heads, 1, 512, dtype=torch.bfloat16)
        launch.attention(query, data, None, None, None, KV_LEN, False, 0.1, 0.0, layout.spec, layout.spec, 512)
    launch.store(data, torch.zeros(1, 1, 100, 512, dtype=torch.bfloat16), torch.arange(100), None, layout.spec, "key")


def compile_deepseek_v4() -> None:
    """Both operators on the key cache of DeepSeek-V4."""
    pages = torch.zeros(4, 64, ds_mla_rows.TOKEN_BYTES, dtype=torch.uint8)
    out, lengths = torch.zeros(1, 100, ds_mla_rows.HEAD_DIM, dtype=torch.bfloat16), torch.tensor([100])
    deepseek_v4.quantize_and_insert_k_cache(out[0], pages, torch.arange(100), 64)
    deepseek_v4.dequantize_and_gather_k_cache(out, pages, lengths, None, torch.tensor([[0, 1]]), 64, 0)


CALLS: dict[str, Callable[..., None]] = {
    "step": compile_step,
    "float32 step": compile_float32_step,
    "prompt": compile_prompt,
    "float32 prompt": compile_float32_prompt,
    "store": compile_stores,
    "gather": compile_gathers,
    "latents": compile_latents,
    "DeepSeek-V4": compile_deepseek_v4,
}
OF_FORMATS = ("step", "float32 step", "prompt", "float32 prompt", "store", "gather")


class Case(NamedTuple):
    """A call whose kernels are compiled; ``arguments`` are the formats of keys and values, and head_dim."""

    gpu: int | str
    call: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return " ".join(map(str, (self.gpu, self.call, *self.arguments)))

    def compile(self) -> list[Resources]:
        """Compile the kernels; returns the resources of each kernel, in no order."""
        programs = 1

        def recorded(*arguments: Any) -> Any:
            nonlocal programs
            config = attention_config(*arguments)
            programs = 1 if config is None else config.programs_per_sm
            return config

        with pytest.MonkeyPatch.context() as monkeypatch:
            compiled = stand_ins(CompileOnly, self.gpu, monkeypatch)
            monkeypatch.setattr(launch, "attention_config", recorded)
            CALLS[self.call](*self.arguments)
        return [
            Resources.of(kernel, programs if name == "attention" else 1)
            for name, kernels in compiled.items()
            for kernel in kernels
        ]


def most_spilled(case: Case) -> int:
    """Bytes of a thread that the kernels of a case may keep in memory."""
    most = MOST_SPILLED.get(case.call, 0)
    return max(most, MOST_SPILLED_IN_WIDE_HEADS) if case.arguments[2:] == (256,) and most else most


def faults(case: Case, kernels: Iterable[Resources]) -> list[str]:
    """The faults that keep kernels from running on the GPU of a case, or make them slow; empty without a fault."""
    limits, found = GPUS[case.gpu].multiprocessor, []
    for kernel in kernels:
        shared = kernel.programs * (kernel.shared + RESERVED)
        registers = kernel.threads * kernel.registers
        if kernel.shared > limits.of_program:
            found.append(f"{kernel.kernel} takes {kernel.shared} of {limits.of_program} bytes of shared memory")
        if kernel.programs > 1 and (shared > limits.shared_memory or kernel.programs * registers > limits.registers):
            found.append(f"{kernel.programs} programs of {kernel.kernel} do not fit a multiprocessor")
        if registers > limits.registers:
            found.append(f"{kernel.kernel} takes {registers} of {limits.registers} registers")
        if kernel.spilled > most_spilled(case):
            found.append(f"{kernel.kernel} keeps {kernel.spilled} bytes of a thread in memory")
    return found


@functools.cache
def all_cases() -> tuple[Case, ...]:
    formats = [(*pair, head_dim) for pair in PAIRS for head_dim in HEAD_DIMS if _supports(pair, head_dim)]
    return tuple(
        case
        for gpu in GPUS
        for case in (
            Case(gpu, "latents"),
            Case(gpu, "DeepSeek-V4"),
            *(Case(gpu, call, arguments) for arguments in formats for call in OF_FORMATS),
        )
    )


def _supports(pair: tuple[str, str], head_dim: int) -> bool:
    layouts = (PackedLayout.parse(spec, role, head_dim) for spec, role in zip(pair, ("key", "value"), strict=True))
    return all(layout.format.unsupported(head_dim, layout.role) is None for layout in layouts)


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The rows of docs/compatibility.md, one for each GPU: calls, kernels, the largest program and slow calls.

    The entry ``slow`` names the slow calls, which have :func:`faults`.
    """
    found: dict[str, Any] = {}
    for name, gpu in GPUS.items():
        all_calls = sum(case.gpu == name for case in all_cases())
        limits = {"of": all_calls, "limit": gpu.multiprocessor.of_program}
        found[str(name)] = {"calls": 0, **limits, "kernels": 0, "shared": 0, "slow": 0}
    cases = {str(case): case for case in all_cases()}
    slow = {}
    for row in rows:
        gpu, kernels = found[str(row["gpu"])], [Resources(*values) for values in row["kernels"]]
        gpu["calls"] += "error" not in row
        for kernel in kernels:
            gpu["kernels"] += 1
            gpu["shared"] = max(gpu["shared"], kernel.shared)
        if reasons := faults(cases[row["case"]], kernels):
            gpu["slow"] += 1
            slow[row["case"]] = "; ".join(reasons)
    return {"triton": triton.__version__, "date": f"{date.today()}", "gpus": found, "slow": dict(sorted(slow.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS")
    parser.add_argument("--gpus", nargs="+", default=[str(gpu) for gpu in GPUS], help="default: all")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="compile every N-th case, from the K-th")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    done = {row["case"] for row in _read(arguments.rows)}
    chosen = [case for case in all_cases() if str(case.gpu) in arguments.gpus][part - 1 :: parts]
    for case in chosen:
        if str(case) not in done:
            begin = time.process_time()
            try:
                row: dict[str, Any] = {"kernels": case.compile()}
            except Exception as error:  # Triton and LLVM raise anything
                row = {"kernels": [], "error": f"{type(error).__name__}: {error}"[:500]}
            seconds = round(time.process_time() - begin, 1)
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": str(case), "gpu": case.gpu, "seconds": seconds, **row}) + "\n")
    PAGE.write_text(json.dumps(summary(_read(arguments.rows)), indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
