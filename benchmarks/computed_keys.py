"""A decode step of attention whose keys are computed from the cached keys: by RoPE, or by a norm.

    python benchmarks/computed_keys.py [--shapes 8,32/8,128,32768 ...] [--formats int4 ...] [--layers 4]

Every format has three rows, for keys that are cached after RoPE (most models), before RoPE (OLMo, x-transformers), and
before a norm. If keys are cached before RoPE, attention applies RoPE to packed keys. If they are cached before a
norm, the step dequantizes them, and attention reads packed values. The baseline is the same step under plain
``torch.compile`` in bfloat16. Each result is first compared with eager code on the same packed caches.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from recording import Chart, Recorder, argument, parse_arguments
from torch import Tensor

import kvcompile
from kvcompile.benching.measuring import Timing, time_graph
from kvcompile.benching.workloads import DEVICE, DTYPE, Shape, check, relative_error

SHAPES = [Shape.parse(text) for text in ("8,32/8,128,32768", "1,32/8,128,131072")]
FORMATS = ["int8_per_token_head", "fp8_e4m3", "int4_unrotated", "int4_per_token_head", "turboquant_4bit_nc"]
CASES = ("cached after RoPE", "cached before RoPE", "cached before a norm")
Step = Callable[..., list[Tensor]]


def with_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def normalized(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def step_of(case: str) -> Step:
    """A step of all layers: it writes keys as ``case`` says, and attends to the caches."""
    computed = normalized if case == "cached before a norm" else with_rope

    def step(q: Tensor, k: Tensor, v: Tensor, caches: list[tuple[Tensor, Tensor]], tables: tuple[Tensor, ...]) -> Any:
        cos, sin, pos = tables
        mask = torch.arange(cos.shape[0], device=q.device) <= pos[:, None]
        outputs = []
        for keys, values in caches:
            keys.index_copy_(2, pos, with_rope(k, cos[pos], sin[pos]) if case == "cached after RoPE" else k)
            values.index_copy_(2, pos, v)
            attended = keys if case == "cached after RoPE" else computed(keys, cos, sin)
            query = computed(q, cos[pos], sin[pos])
            outputs.append(F.scaled_dot_product_attention(query, attended, values, attn_mask=mask, enable_gqa=True))
        return outputs

    return step


def tables_of(shape: Shape) -> tuple[Tensor, ...]:
    """Cosines and sines of all positions, [context, head_dim], and the position of the last token, [1]."""
    frequencies = 10000.0 ** (-torch.arange(0, shape.head_dim, 2, device=DEVICE) / shape.head_dim)
    angles = torch.arange(shape.context, device=DEVICE)[:, None] * frequencies
    cos, sin = (torch.cat([part, part], -1).to(DTYPE) for part in (angles.cos(), angles.sin()))
    return cos, sin, torch.tensor([shape.context - 1], device=DEVICE)


def time_step(
    recorder: Recorder, shape: Shape, layers: int, policy: str | None, case: str, baseline: Timing | None
) -> Timing | None:
    """Add a row for a policy, or for plain ``torch.compile``. Returns its time, or None if it failed."""
    timing: Timing | None = None
    name = policy or "plain"
    with recorder.row(case=case, shape=str(shape), format=name) as row:
        torch._dynamo.reset()
        options: dict[str, Any] = {}
        if policy is not None:
            options = {"backend": "kvquant", "options": {"policy": policy, "on_unsupported": "error"}}
        step = step_of(case)
        compiled = torch.compile(step, **options)
        one = dataclasses.replace(shape, context=1)
        inputs = (shape.query(), *one.key_and_value(), [shape.key_and_value() for _ in range(layers)], tables_of(shape))
        compiled(*inputs)  # packs the caches
        error = max(map(relative_error, compiled(*inputs), step(*inputs)))
        row["relative_error"] = check(error, f"the step of {name}, keys {case},")
        nbytes = kvcompile.cache_nbytes(inputs[3])
        timing = time_graph(compiled, [inputs])
        row |= recorder.timed(timing, nbytes, None if baseline is None else ("torch.compile", baseline))
    return timing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=argument(Shape.parse), default=SHAPES)
    parser.add_argument("--formats", nargs="*", default=FORMATS, help="policies (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers that share a RoPE (default: %(default)s)")
    arguments = parse_arguments(parser, needs_backend=True)
    recorder = Recorder(arguments, Chart("shape", ("case", "format"), ("speedup", "of_read_ceiling")))
    with torch.no_grad():
        for shape in arguments.shapes:
            for case in CASES:
                plain = time_step(recorder, shape, arguments.layers, None, case, None)
                for policy in arguments.formats:
                    time_step(recorder, shape, arguments.layers, policy, case, plain)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
