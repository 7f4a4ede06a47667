"""A compiled hand-written model equals eager code on packed buffers, for every form of write and every step."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from devices import cases_by_device
from hand_written_decoder import HEAD_DIM, WRITES, Decoder, Write
from policies import reading_packed
from torch._dynamo.utils import counters

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

PRESETS = ["int8_per_token_head", "fp8_e4m3", "int4_per_token_head", "turboquant_4bit_nc"]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHUNKS = [117, 7, *[1] * 7]  # across the block boundaries at 64 and 128


def with_packed_buffers(model: Decoder, preset: str) -> Decoder:
    formats = Policy.load(preset).formats_for("", 0, 1)
    assert formats is not None
    model = copy.deepcopy(model)
    model.keys = PackedTensor.from_dense(model.keys, PackedLayout(formats.key, "key", HEAD_DIM))
    model.values = PackedTensor.from_dense(model.values, PackedLayout(formats.value, "value", HEAD_DIM))
    return model


# One preset for each form, in float32, is enough on a CPU. The passes make the same graph of all forms, and therefore
# Inductor the same code.
ON_CPU = [(write, preset, "fp32") for write, preset in zip(WRITES, itertools.cycle(PRESETS), strict=False)]


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("node_by_node_on_cpu")
@pytest.mark.parametrize(
    ("write", "preset", "dtype_name", "device"),
    cases_by_device(itertools.product(WRITES, PRESETS, DTYPES), ON_CPU, generated_on_cpu=ON_CPU[:1]),
)
def test_compiled_logits_equal_eager_logits_on_packed_buffers(
    write: Write, preset: str, dtype_name: str, device: str
) -> None:
    dtype = DTYPES[dtype_name]
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Decoder(write, batch=2).to(device, dtype).eval()
    expected_model = with_packed_buffers(model, preset)
    options = {"policy": reading_packed(preset), "on_unsupported": "error"}
    compiled = torch.compile(model, backend="kvquant", options=options)
    ids = torch.randint(0, 97, (2, sum(CHUNKS)), device=device)
    start = 0
    with torch.no_grad():
        for chunk in ids.split(CHUNKS, dim=1):
            logits, expected = compiled(chunk, start), expected_model(chunk, start)
            start += chunk.shape[1]
            assert (logits - expected).norm() < TOLERANCE[dtype] * expected.norm()
    assert isinstance(model.keys, PackedTensor)
    assert isinstance(model.values, PackedTensor)
    assert counters["kvquant"]["refused"] == 0
