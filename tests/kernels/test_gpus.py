"""GPUs without kernels are refused with a reason, in graphs, in operators and where packed caches are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from kvcompile.kernels.deepseek_v4 import ops as deepseek_v4_ops
from kvcompile.kernels.lang import gpus
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

CUDA = torch.device("cuda")
Become = Callable[[str, str], None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Iterator[Become]:
    """Make this machine have a GPU with this name and architecture."""

    def change(name: str, architecture: str) -> None:
        numbers = architecture.split(".") if "." in architecture else ["9", "0"]
        major, minor = map(int, numbers)
        properties = SimpleNamespace(name=name, major=major, minor=minor, gcnArchName=f"{architecture}:sramecc+:xnack-")
        monkeypatch.setattr(gpus, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.version, "hip", "7.0" if architecture.startswith("gfx") else None)
        gpus.why_unsupported.cache_clear()

    yield change
    gpus.why_unsupported.cache_clear()


@pytest.mark.parametrize(
    ("name", "architecture", "reason"),
    [
        ("Tesla T4", "7.5", "Tesla T4 has compute capability 7.5, and kernels need 8.0"),
        ("Tesla V100", "7.0", "Tesla V100 has compute capability 7.0, and kernels need 8.0"),
        ("MI210", "gfx90a", "MI210 is a gfx90a, and kernels were compiled for gfx942 only"),
    ],
)
def test_a_gpu_without_kernels_is_refused_with_a_reason(name: str, architecture: str, reason: str, become: Become):
    become(name, architecture)
    layout = PackedLayout("int8_per_token_head", "key", 64)
    assert gpus.standing_of(CUDA) == "refused"
    assert layout.unsupported_on(CUDA) == reason
    assert layout.unsupported_on(torch.device("cpu")) is None
    with pytest.raises(ValueError, match=f"format int8_per_token_head cannot hold this cache: {reason}"):
        PackedTensor.zeros((1, 2, 64, 64), torch.bfloat16, layout, "bhtd", device=CUDA)
    with pytest.raises(ValueError, match=f"kvcompile::quantize_and_insert_k_cache: {reason}; use another GPU"):
        deepseek_v4_ops._check_cache(deepseek_v4_ops.INSERT, SimpleNamespace(device=CUDA), 64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "standing"),
    [
        ("9.0", "tested"),
        *((one, "compiled") for one in ("8.0", "8.6", "8.9", "10.0", "12.0", "gfx942")),
        *((one, "not compiled") for one in ("8.7", "10.3", "12.1", "13.0")),
    ],
)
def test_every_other_gpu_runs_kernels(architecture: str, standing: str, become: Become):
    become("some GPU", architecture)
    assert gpus.why_unsupported(CUDA) is None
    assert gpus.standing_of(CUDA) == standing


def test_kernels_are_compiled_for_every_gpu_of_the_table():
    pytest.importorskip("triton")
    from aot_compilation import GPUS  # not above: it needs Triton

    assert [str(gpu) for gpu in GPUS] == [gpu.architecture.replace(".", "") for gpu in gpus.GPUS]
