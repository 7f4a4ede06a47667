"""Every kernel compiles for every GPU of the table, fits into its shared memory, and spills little; no GPU is needed.

The case list is ``all_cases()`` of ``tests/support/aot_devices.py``, which also compiles all of them.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from aot_compilation import GPUS
from aot_devices import FORMATS, HEAD_DIMS, OF_FORMATS, PAGE, RESIDUAL, WORDS, Case, all_cases, faults

from kvcompile.kernels.lang.triton import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")


def sampled() -> list[Case]:
    """One case of each call for each GPU and head_dim, with changing formats; and all cases without a format."""
    cases, found = all_cases(), []
    for turn, (gpu, head_dim) in enumerate((gpu, head_dim) for gpu in GPUS for head_dim in HEAD_DIMS):
        for place, call in enumerate(OF_FORMATS):
            fitting = [case for case in cases if case[:2] == (gpu, call) and case.arguments[2] == head_dim]
            found.append(fitting[(5 * turn + 9 * place) % len(fitting)])
    return [*found, *(case for case in cases if not case.arguments)]


BY_DEFAULT = (
    Case(89, "prompt", ("int8_per_token_head", "int8_per_token_head", 256)),
    Case(90, "float32 step", ("int8_per_token_head", "turboquant_4bit", 256)),
    Case("gfx942", "step", ("int8_per_token_head", "int8_per_token_head", 128)),
)
"""A wide head on a GPU with little shared memory, a wide rotation, and a GPU of AMD."""

TAKE_LONG = (
    Case(90, "float32 step", ("turboquant_4bit", "turboquant_4bit", 256)),
    Case(90, "float32 prompt", ("turboquant_4bit", "turboquant_4bit", 256)),
    Case("gfx942", "step", ("turboquant_4bit", "turboquant_4bit", 128)),
)
"""Two wide rotations in a step, a wide rotation in a prompt, and a rotation on a GPU of AMD."""


KNOWN = {
    **json.loads(PAGE.read_text(encoding="utf-8"))["slow"],
    "90 store float16 float16 128": "the store spills 0.9 KiB with Triton 3.7, and nothing with 3.6",
}
"""Cases that are slower than they could be, and why. Their results are right."""


def marks_of(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    reason = KNOWN.get(str(case))
    return (pytest.mark.slow, *(() if reason is None else (pytest.mark.xfail(reason=reason, strict=False),)))


@pytest.mark.parametrize(
    "case", [*BY_DEFAULT, *(pytest.param(case, marks=marks_of(case)) for case in [*TAKE_LONG, *sampled()])], ids=str
)
def test_every_kernel_fits_the_gpu(case: Case) -> None:
    assert faults(case, case.compile()) == []


BOTH_EXACT = [
    (name, call) for name in (*FORMATS, *WORDS) if "channel" not in name for call in ("store", "step", "float32 step")
]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        pytest.param(*case, marks=() if case == ("int8_per_token_head", "store") else pytest.mark.slow)
        for case in BOTH_EXACT
    ],
)
def test_every_format_compiles_beside_tokens_in_full_precision(name: str, call: str) -> None:
    """A step decodes blocks that only keys or only values hold exactly. A store decodes a block that it opens again."""
    kernels = Case(90, call, (name + RESIDUAL, name + RESIDUAL, 128)).compile()
    assert max(kernel.shared for kernel in kernels) <= GPUS[90].multiprocessor.of_program
