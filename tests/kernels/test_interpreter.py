"""Without a GPU the Triton kernels run in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is what this test starts")
@pytest.mark.parametrize(
    "suite",
    [
        "test_store_kernel.py",
        "test_attention_kernel.py",
        "test_latent_kernels.py",
        "test_prefill.py",
        "test_references.py",
        "test_deepseek_v4_kernels.py",
        "test_gather.py",
        "test_visible_range.py",
        "test_dequantize.py",
    ],
)
def test_the_kernels_agree_with_the_specification_in_the_interpreter(suite):
    options = ["-q", "-n", "0", "-m", "not gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name(suite))]
    result = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
