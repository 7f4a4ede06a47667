"""Without a GPU the Triton kernels run in Triton's interpreter, in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_tests import INTERPRETED_TOGETHER

pytest.importorskip("triton")

ALL = tuple(name for files in INTERPRETED_TOGETHER for name in files)
"""One process runs a fortieth of the cases of all files, because its imports take as long as many cases."""

PARTS, DEFAULT = 40, 30
"""The part that runs by default has cases of every kernel."""


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this test starts such a process")
@pytest.mark.parametrize(
    ("files", "marks", "part"),
    [
        *(
            pytest.param(
                *(ALL, "not gpu and not slow", f"{part}/{PARTS}"),
                id=f"{part}/{PARTS}",
                marks=() if part == DEFAULT else pytest.mark.slow,
            )
            for part in range(1, PARTS + 1)
        ),
        *(
            pytest.param(files, "not gpu and slow", "1/1", id=files[0].removesuffix(".py"), marks=pytest.mark.slow)
            for files in INTERPRETED_TOGETHER
        ),
    ],
)
def test_the_kernels_agree_with_the_specification_in_the_interpreter(files, marks, part):
    options = ["-q", "-n", "0", "-m", marks, "--part", part, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(str(Path(__file__).with_name(name)) for name in files)]
    result = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
