"""The Triton kernels of the DeepSeek-V4 K cache agree with the specification bit for bit."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from deepseek_v4_cases import (
    NOWHERE,
    Requests,
    assert_same_bfloat16,
    empty_cache,
    poisoned_output,
    random_cache,
    random_tokens,
)
from formats_of_every_kind import in_turn

from kvcompile.kernels.deepseek_v4 import kernels
from kvcompile.kernels.formats import ds_mla_rows as spec
from kvcompile.kernels.lang import launcher

# NumPy warns when the interpreter multiplies numbers that are not finite.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in multiply:RuntimeWarning")

CPU = torch.device("cpu")
BLOCK_SIZES = [1, 2, 5, 16, 64]


@pytest.fixture(params=[pytest.param("hardware", marks=pytest.mark.gpu), "portable"])
def conversion(request, device, monkeypatch):
    """Convert e4m3 by instructions of the GPU, or by integer arithmetic, as on GPUs without such instructions."""
    if request.param == "hardware" and not launcher.converts_e4m3(device):
        pytest.skip("the device has no instructions for e4m3")
    monkeypatch.setattr(launcher, "converts_e4m3", lambda device: request.param == "hardware")


def same(tensor):
    return tensor


def assert_inserts_like_the_specification(
    k, k_cache, slot_mapping, block_size, device, restride_k=same, restride_slots=same
):
    """Insert with the kernel and with the specification, and compare every byte of the cache.

    ``restride_k`` and ``restride_slots`` are applied to the tokens and the slots on either device.
    """
    actual = k_cache.to(device, copy=True)
    slots = restride_slots(slot_mapping.to(device))
    spec.quantize_and_insert_k_cache(restride_k(k), k_cache, restride_slots(slot_mapping), block_size)
    kernels.quantize_and_insert_k_cache(restride_k(k.to(device)), actual, slots, block_size)
    assert torch.equal(actual.cpu(), k_cache)


def assert_gathers_like_the_specification(requests, k_cache, offset, device, restride_out=same, pages_of=same):
    """Gather with the kernel and with the specification into poisoned tensors, and compare all rows.

    ``restride_out`` is applied to the outputs on either device, and ``pages_of`` to the buffers of the cache.
    """
    expected, actual = (restride_out(poisoned_output(requests, offset).to(where)) for where in (CPU, device))
    spec.dequantize_and_gather_k_cache(expected, pages_of(k_cache), *requests.to(CPU), offset)
    on_device = pages_of(k_cache.to(device)), *requests.to(device)
    kernels.dequantize_and_gather_k_cache(actual, *on_device, offset)
    assert_same_bfloat16(actual.cpu(), expected)


@pytest.mark.parametrize(("block_size", "num_tokens"), in_turn(BLOCK_SIZES, [1, 17, 70]))
def test_inserted_bytes_equal_the_specification(block_size, num_tokens, conversion, device):
    num_blocks = num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(2))[:num_tokens]
    slots[4::5] = -1
    k_cache = empty_cache(num_blocks, block_size)
    assert_inserts_like_the_specification(random_tokens(num_tokens), k_cache, slots, block_size, device)


def test_every_bfloat16_number_is_quantized_as_specified_beside_numbers_of_any_size(conversion, device):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(128, 512)
    blocks = every[:, torch.randperm(512, generator=torch.Generator().manual_seed(3))]
    k = torch.cat([every, blocks[torch.randperm(128, generator=torch.Generator().manual_seed(4))].roll(64, 1)])
    k = torch.cat([k, (k.float() * 2.0**-40).to(torch.bfloat16)])
    assert_inserts_like_the_specification(k, empty_cache(9, 64), torch.arange(len(k)), 64, device)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_becomes_nan_and_touches_no_other(bad, conversion, device):
    k = random_tokens(5)
    k[2, 70] = k[4, 447] = k[4, 500] = bad
    assert_inserts_like_the_specification(k, empty_cache(2, 4), torch.tensor([1, 3, 4, 0, 7]), 4, device)


@pytest.mark.parametrize(
    "restride",
    [
        lambda k: k.t().contiguous().t(),  # channels far apart
        lambda k: torch.cat([k, k], 1)[:, :512],  # part of a fused projection
        lambda k: torch.cat([k, k], 1)[:, 3:515],  # that starts anywhere
        lambda k: k[:1].expand(len(k), -1),  # one vector for all tokens
        lambda k: torch.cat([k, k])[1:],  # more tokens than slots
    ],
)
def test_tokens_may_have_any_strides(restride, device):
    slots = torch.tensor([7, -1, 0, 3, 4, 5])
    assert_inserts_like_the_specification(random_tokens(6), empty_cache(2, 4), slots, 4, device, restride)


@pytest.mark.parametrize(
    "restride", [lambda slots: slots.int(), lambda slots: torch.stack([slots, slots + 1], 1)[:, 0]]
)
def test_slots_may_be_strided_and_have_32_bits(restride, device):
    slots = torch.tensor([7, -1, 0, 3, 4, 5])
    k, k_cache = random_tokens(6), empty_cache(2, 4)
    assert_inserts_like_the_specification(k, k_cache, slots, 4, device, restride_slots=restride)


@pytest.mark.parametrize(
    ("block_size", "lens"),
    in_turn(
        BLOCK_SIZES,
        [
            ([19, 0, 57, 64, 5], [6, 0, 29, 64, 0], 5),
            ([1], None, 0),
            ([9, 23, 7], None, 0),
            ([130], [67], 2),
        ],
    ),
)
def test_gathered_rows_equal_the_specification(block_size, lens, conversion, device):
    seq_lens, gather_lens, offset = lens
    requests = Requests.on_shuffled_pages(seq_lens, gather_lens, block_size)
    k_cache = random_cache(requests.num_blocks, block_size)
    assert_gathers_like_the_specification(requests, k_cache, offset, device)


def test_every_code_is_read_as_specified_under_every_scale(conversion, device):
    k_cache = torch.zeros(4, 64, 584, dtype=torch.uint8)
    pages, every_byte = k_cache.view(4, 64 * 584), torch.arange(256, dtype=torch.uint8)
    pages[:, : 64 * 576] = every_byte.repeat(64 * 576 // 256)
    pages[:, 64 * 576 :] = every_byte.repeat_interleave(8).view(4, 512)  # one scale a token
    requests = Requests(torch.tensor([256]), None, torch.arange(4)[None], 64, 4)
    assert_gathers_like_the_specification(requests, k_cache, 0, device)


def test_inserted_tokens_are_gathered(device):
    requests = Requests.on_shuffled_pages([19, 8, 257], [6, 8, 129], 64)
    k_cache = empty_cache(requests.num_blocks, 64).to(device)
    slots = torch.cat(requests.slots()).to(device)
    k = torch.randn(len(slots), 512, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    out = poisoned_output(requests, 5).to(device)
    kernels.quantize_and_insert_k_cache(k.to(device), k_cache.flatten(1), slots, 64)
    kernels.dequantize_and_gather_k_cache(out, k_cache, *requests.to(device), 5)
    for req, tokens in enumerate(k.split([6, 8, 129])):
        read = out[req, 5 : 5 + len(tokens)].cpu()
        assert torch.equal(read[:, 448:], tokens[:, 448:])
        nope = spec.dequantize(*spec.quantize(tokens[:, :448]))
        assert_same_bfloat16(read[:, :448], nope)


@pytest.mark.parametrize("num_reqs", [2, 33, pytest.param(130, marks=pytest.mark.slow)])
def test_any_number_of_requests_shares_the_work(num_reqs, device):
    seq_lens = torch.randint(0, 9, (num_reqs,), generator=torch.Generator().manual_seed(6)).tolist()
    requests = Requests.on_shuffled_pages(seq_lens, None, 4)
    assert_gathers_like_the_specification(requests, random_cache(requests.num_blocks, 4), 1, device)


@pytest.mark.parametrize(("programs", "block_size"), in_turn([1, 4, 15], [5, 16]))
def test_any_number_of_programs_gathers_all_tokens(programs, block_size, device, monkeypatch):
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: programs)
    monkeypatch.setattr(kernels, "WARPS_PER_SM", kernels.NUM_WARPS)
    requests = Requests.on_shuffled_pages([70, 3, 40], [61, 3, 17], block_size)
    assert_gathers_like_the_specification(requests, random_cache(requests.num_blocks, block_size), 0, device)


@pytest.mark.parametrize(
    "restride",
    [
        lambda out: out.transpose(0, 1).contiguous().transpose(0, 1),
        lambda out: out.transpose(1, 2).contiguous().transpose(1, 2),
        lambda out: torch.cat([out, out], 2)[..., 3:515],
        lambda out: torch.cat([out, out])[1:],
    ],
)
def test_outputs_may_have_any_strides(restride, device):
    requests = Requests.on_shuffled_pages([9, 3], [5, 3], 4)
    assert_gathers_like_the_specification(requests, random_cache(requests.num_blocks, 4), 1, device, restride)


def test_lengths_and_pages_may_be_strided_and_have_64_bits(device):
    requests = Requests.on_shuffled_pages([9, 0, 3], [5, 0, 3], 4)
    k_cache, expected = random_cache(requests.num_blocks, 4), poisoned_output(requests, 1)
    actual = expected.to(device, copy=True)
    spec.dequantize_and_gather_k_cache(expected, k_cache, *requests.to(CPU), 1)
    seq_lens, gather_lens, block_table, block_size = requests.to(device)
    lens = torch.stack([seq_lens, gather_lens], 1).long()
    block_table = block_table.long().t().contiguous().t()
    kernels.dequantize_and_gather_k_cache(
        actual, k_cache.to(device), lens[:, 0], lens[:, 1], block_table, block_size, 1
    )
    assert_same_bfloat16(actual.cpu(), expected)


@pytest.mark.parametrize("padding", [8, 64])
@pytest.mark.parametrize("block_size", [3, 64])
def test_pages_may_be_part_of_a_larger_buffer(padding, block_size, device):
    page_bytes = block_size * 584
    expected = random_cache(5, block_size).view(5, -1).repeat(1, 2)[:, : page_bytes + padding].contiguous()
    actual = expected.to(device, copy=True)
    k, slots = random_tokens(4), torch.tensor([0, -1, 2 * block_size + 1, block_size])
    spec.quantize_and_insert_k_cache(k, expected[1:4, :page_bytes], slots, block_size)
    kernels.quantize_and_insert_k_cache(k.to(device), actual[1:4, :page_bytes], slots.to(device), block_size)
    assert torch.equal(actual.cpu(), expected)
    requests = Requests.on_shuffled_pages([block_size + 2], [4], block_size)
    assert_gathers_like_the_specification(
        requests, expected, 0, device, pages_of=lambda buffer: buffer[1:, :page_bytes]
    )


def test_offsets_beyond_two_gigabytes_are_right(device):
    """This runs in the interpreter, too: the system allocates no memory for pages that are never touched."""
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free memory")
    num_blocks, rows = 2**31 // (64 * 584) + 2, 2**31 // 512 + 2
    k_cache = torch.empty(num_blocks, 64, 584, dtype=torch.uint8, device=device)
    out = torch.empty(1, rows, 512, dtype=torch.bfloat16, device=device)
    k = random_tokens(2)
    last = num_blocks * 64 - 1
    kernels.quantize_and_insert_k_cache(k.to(device), k_cache, torch.tensor([last, last - 1], device=device), 64)
    expected = empty_cache(1, 64)
    spec.quantize_and_insert_k_cache(k, expected, torch.tensor([63, 62]), 64)
    assert torch.equal(
        k_cache.view(num_blocks, -1)[-1, 62 * 576 : 64 * 576].cpu(), expected.flatten()[62 * 576 : 64 * 576]
    )
    assert torch.equal(k_cache.view(num_blocks, -1)[-1, -16:].cpu(), expected.flatten()[-16:])
    table = torch.tensor([[NOWHERE, num_blocks - 1]], dtype=torch.int32, device=device)
    lens = [torch.tensor([n], dtype=torch.int32, device=device) for n in (128, 2)]
    kernels.dequantize_and_gather_k_cache(out, k_cache, *lens, table, 64, rows - 2)
    assert_same_bfloat16(out[0, -2:, :448].cpu(), spec.dequantize(*spec.quantize(k[:, :448])).flip(0))


def test_no_tokens_and_no_requests_are_allowed(device):
    k_cache = random_cache(2, 4).to(device)
    before = k_cache.clone()
    kernels.quantize_and_insert_k_cache(random_tokens(3).to(device), k_cache, torch.tensor([-1, -7], device=device), 4)
    kernels.quantize_and_insert_k_cache(random_tokens(3).to(device), k_cache, torch.tensor([], device=device).long(), 4)
    assert torch.equal(k_cache, before)
    for seq_lens in ([], [0], [0, 0]):
        requests = Requests.on_shuffled_pages(seq_lens, None, 4)
        assert_gathers_like_the_specification(requests, random_cache(2, 4), 2, device)
        assert_gathers_like_the_specification(requests, random_cache(0, 4), 2, device)


def insert_outside(device, slot):
    """Insert a token at ``slot`` of a cache of one page between two others. Returns whether all bytes are unchanged."""
    buffer = random_cache(3, 4).to(device)
    before = buffer.clone()
    slots = torch.tensor([slot], device=device)
    kernels.quantize_and_insert_k_cache(random_tokens(1).to(device), buffer[1:2], slots, 4)
    return torch.equal(buffer, before)


def gather_outside(device, seq_len, gather_len, page):
    """Gather two requests; the first does not fit. Returns whether only rows of the second changed."""
    requests = Requests(torch.tensor([seq_len, 2]), torch.tensor([gather_len, 2]), torch.tensor([[page], [0]]), 4, 1)
    out = torch.full((3, 7, 512), 3.0, dtype=torch.bfloat16, device=device)
    kernels.dequantize_and_gather_k_cache(out[:, :5], random_cache(1, 4).to(device), *requests.to(device), 2)
    return bool((out[0] == 3).all() and (out[2] == 3).all() and (out[1, 2:4] != 3).any() and (out[1, 4:] == 3).all())


OUTSIDE = [
    ("a slot is outside", "insert_outside", (4,)),
    ("a slot is outside", "insert_outside", (2**40,)),
    ("gathers more tokens than", "gather_outside", (4, 4, 0)),  # than there are rows
    ("gathers more tokens than", "gather_outside", (2, 3, 0)),  # than there are tokens
    ("gathers more tokens than", "gather_outside", (5, 1, 0)),  # than there are pages
    ("gathers more tokens than", "gather_outside", (2, -1, 0)),
    ("a page in block_table is outside", "gather_outside", (3, 2, -1)),
    ("a page in block_table is outside", "gather_outside", (3, 2, 1)),
]
outside = pytest.mark.parametrize(("message", "act", "arguments"), OUTSIDE)


@outside
def test_arguments_that_do_not_fit_reach_no_memory(message, act, arguments, device):
    if device.type == "cuda":
        pytest.skip("an assertion fails there, and takes the process's CUDA context along")
    assert globals()[act](device, *arguments)


@outside
@pytest.mark.gpu
def test_arguments_that_do_not_fit_fail_an_assertion_on_a_gpu(message, act, arguments):
    program = f"import test_deepseek_v4_kernels as t; t.{act}(t.torch.device('cuda'), *{arguments})"
    folder = Path(__file__).parent
    environment_path = f"import sys; sys.path.insert(0, {str(folder.parent / 'support')!r}); "
    done = subprocess.run(
        [sys.executable, "-c", environment_path + program], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
    assert "device-side assert" in done.stderr


@pytest.mark.gpu
def test_the_operators_run_the_kernels_on_a_gpu_and_refuse_tensors_of_a_cpu():
    from kvcompile.kernels.deepseek_v4 import ops as deepseek_v4_ops  # noqa: F401 - defines torch.ops.kvcompile

    k, slots, k_cache = random_tokens(3), torch.tensor([2, -1, 0]), empty_cache(1, 4)
    on_device = k_cache.cuda()
    spec.quantize_and_insert_k_cache(k, k_cache, slots, 4)
    with pytest.raises(ValueError, match=r"slot_mapping must be .* on cuda:0, but is .* on cpu"):
        torch.ops.kvcompile.quantize_and_insert_k_cache(k.cuda(), on_device, slots, 4)
    torch.ops.kvcompile.quantize_and_insert_k_cache(k.cuda(), on_device, slots.cuda(), 4)
    assert torch.equal(on_device.cpu(), k_cache)
    graph = torch.cuda.CUDAGraph()
    requests = Requests(torch.tensor([3]).cuda(), torch.tensor([1]).cuda(), torch.tensor([[0]]).cuda(), 4, 1)
    out = torch.full((1, 5, 512), 3.0, dtype=torch.bfloat16, device="cuda")
    arguments = (out, on_device, *requests.to(out.device), 1)
    torch.ops.kvcompile.dequantize_and_gather_k_cache(*arguments)
    with torch.cuda.graph(graph):
        torch.ops.kvcompile.dequantize_and_gather_k_cache(*arguments)
    requests.gather_lens.fill_(3)  # lengths are read on the device, at replay
    out.fill_(3.0)
    graph.replay()
    expected = torch.full((1, 5, 512), 3.0, dtype=torch.bfloat16)
    spec.dequantize_and_gather_k_cache(expected, k_cache, *requests.to(CPU), 1)
    assert_same_bfloat16(out.cpu(), expected)
