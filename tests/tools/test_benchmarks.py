"""Benchmarks time only correct results, lose no result, and name their requirements."""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import cpu_decode
import latents
import llama
import pytest
import store
import torch
import torch.nn.functional as F
import transformers
from packed_bytes import empty_packed
from recording import COLUMNS, Chart, Recorder, Results, argument, command_line, in_words, plot

import kvcompile
from kvcompile.benching import measuring, workloads
from kvcompile.benching.errors import BenchError, NoCudaError
from kvcompile.benching.measuring import Timing
from kvcompile.benching.workloads import Caches, Shape
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.packing import read_tokens
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.site import FormatPair

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())
CUDA_SCRIPTS = ["computed_keys", "decode", "eager", "latents", "llama_step", "prefill", "store"]
INT8 = FormatPair("int8_per_token_head", "int8_per_token_head")
SHAPE = Shape(2, 4, 2, 64, 192)
CPU = torch.device("cpu")

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


pytestmark = pytest.mark.usefixtures("seed_without_grad")


@pytest.fixture
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the GPU benchmarks on this device, with meaningless times and ceilings."""

    def time_once(fn: Any, inputs: Any = ((),), **settings: Any) -> Timing:
        for arguments in inputs:
            fn(*arguments)
        return Timing(1e-3, 0.0, "nothing")

    for name in (
        "computed_keys",
        "decode",
        "eager",
        "latents",
        "recording",
        "store",
        "kvcompile.benching.decode_attention",
        "kvcompile.benching.workloads",
    ):
        module = importlib.import_module(name)
        replacements = {
            "time_graph": time_once,
            "time_steps": lambda run, before: time_once(run),
            "temporaries": lambda run: 0,
            "num_sets": lambda nbytes: 2,
            "require_cuda": lambda what: None,
            "read_ceiling": lambda: 1e12,
            "copy_ceiling": lambda: 1e12,
            "describe_device": lambda device: {"name": "Nothing, Inc."},
        }
        for attribute in replacements.keys() & vars(module).keys():
            monkeypatch.setattr(module, attribute, replacements[attribute])
    monkeypatch.setattr(torch._inductor, "compile", lambda gm, inputs: gm)


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py", *map(str, arguments)])
    return importlib.import_module(script).main() or 0


def recorder(folder: Path) -> Recorder:
    return Recorder(argparse.Namespace(output=folder, tag=None), Chart("shape", ("format",), ("speedup",)), "cpu")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, script, "--help")
    assert stopped.value.code == 0
    assert f"python benchmarks/{script}.py" in capsys.readouterr().out


@without_cuda
@pytest.mark.parametrize("script", CUDA_SCRIPTS)
def test_a_benchmark_of_a_gpu_refuses_to_run_without_one(script, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, script)
    assert stopped.value.code == 2
    assert f"{script}.py needs a CUDA device" in capsys.readouterr().err


@without_cuda
@pytest.mark.slow
def test_scripts_run_as_scripts():
    done = subprocess.run([sys.executable, str(BENCHMARKS / "decode.py")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr


@without_cuda
@pytest.mark.parametrize("measure", ["read_ceiling", "copy_ceiling"])
def test_ceilings_refuse_to_be_measured_without_a_gpu(measure):
    with pytest.raises(NoCudaError, match=f"{measure} needs a CUDA device"):
        getattr(measuring, measure)()
    with pytest.raises(NoCudaError, match="time_graph needs a CUDA device"):
        measuring.time_graph(lambda: None)


def test_a_timing_is_the_median_and_knows_its_spread():
    timing = Timing.of([1.0, 4.0, 2.0, 3.0, 100.0], "graph")
    assert timing.seconds == 3.0
    assert timing.spread == pytest.approx(2.0 / 3.0)
    assert timing.microseconds == 3e6


@pytest.mark.gpu
def test_a_call_is_timed_in_a_cuda_graph_unless_it_cannot_be_recorded():
    # In a separate process: a failed recording leaves the random generator of the device unusable.
    program = """
import torch
from kvcompile.benching import measuring
x = torch.randn(1 << 24, device="cuda")
assert measuring.time_graph(x.neg).method == "graph"
timing = measuring.time_graph(lambda: x.sum().item())
assert timing.method == "events"
assert timing.note.startswith("not recorded")
assert torch.cuda.current_stream() == torch.cuda.default_stream()
"""
    subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("loads", "num_warps"), measuring.READ_CONFIGS)
def test_the_read_kernel_reads_the_first_and_the_last_number(loads, num_warps):
    width = 128 * num_warps
    for index in (0, -1):
        numbers = torch.full((8 * loads * width,), -2, dtype=torch.int32, device="cuda")
        numbers[index] = -1
        out = torch.zeros(width, dtype=torch.int32, device="cuda")
        measuring.read_kernel[(8,)](numbers, out, -1, loads, width, num_warps=num_warps)
        assert out.tolist().count(-1) == 1
        assert out[index] == -1


def test_the_read_kernel_keeps_every_load_and_loads_16_bytes_at_once():
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for loads, num_warps in measuring.READ_CONFIGS:
        source = ASTSource(
            measuring.read_kernel,
            signature={"source_ptr": "*i32", "out_ptr": "*i32", "impossible": "i32"},
            constexprs={"LOADS": loads, "WIDTH": 128 * num_warps},
            attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        assert compiled.asm["ptx"].count("ld.global") == compiled.asm["ptx"].count("ld.global.v4.b32") == loads


def test_results_are_read_as_they_were_written(tmp_path):
    results = Results(
        "decode", "python benchmarks/decode.py", {"name": "H", "capability": [9, 0]}, {"torch": "2", "driver": None},
        Chart("shape", ("case", "format"), ("speedup",)), {"read": 4.35e12}, [{"shape": "(1)", "speedup": 1 / 3}],
    )  # fmt: skip
    path = tmp_path / "new folder" / "decode.json"
    results.write(path)
    assert Results.read(path) == results
    assert [file.name for file in path.parent.iterdir()] == ["decode.json"]


@pytest.mark.parametrize(
    ("ranks", "command"),
    [(None, "python bench.py --repeats 4"), ("2", "torchrun --nproc-per-node 2 bench.py --repeats 4")],
)
def test_results_name_the_command_that_started_them(ranks, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--repeats", "4"])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert command_line() == command


def test_a_row_that_fails_is_kept_with_its_error_and_the_others_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks/decode.py"])
    rows = recorder(tmp_path)
    with rows.row(shape="a", format="int8") as row:
        row["speedup"] = 1.5
    assert len(Results.read(rows.path).rows) == 1, "the file is written after every row"
    with rows.row(shape="a", format="int4"):
        raise ValueError("too many bits\nand more")
    with rows.row(shape="b", format="int4") as row:
        row |= rows.timed(Timing(2e-6, 0.01, "graph", "a note"), baseline=("plain", Timing(5e-6, 0.0, "graph")))
    assert rows.finish() == 1
    saved = Results.read(rows.path)
    assert saved.rows[1] == {"shape": "a", "format": "int4", "error": "ValueError: too many bits and more"}
    assert saved.rows[2]["microseconds"] == pytest.approx(2.0)
    assert saved.rows[2]["speedup"] == pytest.approx(2.5)
    assert saved.rows[2]["note"] == "a note"
    assert saved.device["name"] in capsys.readouterr().out
    assert saved.versions["torch"] == torch.__version__


def test_saved_results_are_shown_and_plotted_again(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    rows = [
        {"shape": shape, "format": name, "speedup": speedup, "microseconds": 12.34}
        for shape in ("(8, 32/8, 128, 32768)", "(1, 32/8, 128, 131072)")
        for name, speedup in (("int8", 1.9), ("int4", 3.1), ("int4", 3.2))
    ] + [{"shape": "(1, 32/8, 128, 131072)", "format": "int2", "error": "RuntimeError: no"}]
    results = Results("decode", "", {"name": "H"}, {"torch": "2"}, Chart("shape", ("format",), ("speedup",)), {}, rows)
    results.write(tmp_path / "decode-h.json")
    assert run(monkeypatch, "recording", tmp_path / "decode-h.json") == 0
    assert (tmp_path / "decode-h.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("int8", "12.3", "3.10", "RuntimeError: no"))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("(8, 32/8, 128, 32768)", "8 sequences of 32,768 tokens; 32 query heads, 8 KV heads, head_dim 128"),
        ("(1, 128/1, 512, 131072)", "1 sequence of 131,072 tokens; 128 query heads, 1 KV head, head_dim 512"),
        ("(8, 8, 128, 32768)", "8 sequences of 32,768 tokens; 8 KV heads, head_dim 128"),
        ("attention module", "attention module"),
        ("1000 visible tokens of 131072", "1,000 visible tokens of 131,072"),
        ("transform_6543", "transform_6543"),
    ],
)
def test_plots_name_shapes_in_words(shape, words):
    assert in_words(shape) == words


RESULT_FILES = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULT_FILES, ids=[path.stem for path in RESULT_FILES])
def test_plots_of_saved_results_name_units_and_lie_within_their_frame(path):
    pytest.importorskip("matplotlib")
    figure = plot(Results.read(path))
    figure.draw_without_rendering()
    frame = figure.bbox.padded(1)
    names = [text for axes in figure.get_axes() for text in (axes.title, *axes.get_yticklabels())]
    others = [text for axes in figure.get_axes() for text in (axes.xaxis.label, *axes.texts)]
    for text in (*names, *others):
        box = text.get_window_extent()
        assert frame.contains(*box.min), f"cut: {text.get_text()!r}"
        assert frame.contains(*box.max), f"cut: {text.get_text()!r}"
    for name in (text.get_text() for text in names):
        assert not any(part.replace(",", "").isdigit() for part in name.split(", ")), f"no unit: {name!r}"
        assert "bf16" not in name
    assert "one for each group" not in " ".join(text.get_text() for text in others)


def test_every_column_is_explained_in_the_readme():
    readme = (BENCHMARKS / "README.md").read_text()
    table = readme.split("## Columns")[1].strip().split("\n\n")[0]
    assert table.splitlines()[2:] == [f"| {column.title} | {column.meaning} |" for column in COLUMNS.values()]
    assert all(f"benchmarks/{script}.py" in readme for script in SCRIPTS)


def test_shapes_are_read_as_they_are_printed():
    assert Shape.parse("2,4/2,64,192") == Shape.parse(str(SHAPE)) == SHAPE
    for wrong in ("2,4/3,64,192", "2,4,64,192", "2,4/2,64,0", "2,4/2,64", "a,4/2,64,192"):
        with pytest.raises(BenchError, match="is not batch,heads/kv_heads,head_dim,context"):
            Shape.parse(wrong)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (Shape.parse, "2,4", "is not batch,heads/kv_heads,head_dim,context"),
        (workloads.parse_formats, "int9", "unknown dtype 'int9'"),
        (workloads.parse_formats, "auto", "leaves the cache unpacked"),
        (workloads.parse_formats, "int4+int9", "unknown dtype 'int9'"),
        (workloads.parse_formats, "int4+int4_per_channel", "values cannot have scales per channel"),
        (workloads.parse_formats, "auto+int4", "dtype: auto is for whole caches"),
        (workloads.parse_fully_packed, "int4", "keeps recent tokens exact"),
    ],
)
def test_arguments_that_are_wrong_say_why(parse, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        argument(parse)(text)


def test_two_formats_may_be_named_for_keys_and_values():
    name, pair = workloads.parse_formats("int4+turboquant_3bit_nc")
    assert name == "int4+turboquant_3bit_nc"
    assert pair == FormatPair("int4_per_channel", "int3_unrotated")


@pytest.mark.parametrize("step", [None, 64])
def test_caches_are_windows_of_random_data_with_the_layout_of_separate_caches(step):
    caches = Caches(SHAPE, FormatPair("int8_per_token_head", "int4_per_token_head"))
    sets = caches.random(3, step)
    for part, layout in enumerate(caches.layouts):
        own = empty_packed(layout, SHAPE.context, SHAPE.batch, SHAPE.num_kv_heads, workloads.DEVICE)
        read = [read_tokens(data[part], layout, SHAPE.context) for data in sets]
        for data, tokens in zip(sets, read, strict=True):
            assert data[part].shape == own.shape
            assert data[part].stride() == own.stride()
            assert tokens.std().item() == pytest.approx(1.0, abs=0.1)
        if step is None:
            assert not torch.equal(read[0], read[1])
        else:
            assert torch.equal(read[0][:, :, 64:], read[1][:, :, :-64])
    assert caches.nbytes(SHAPE.context) == sum(part.nbytes for part in sets[0])


@pytest.mark.parametrize("script", [pytest.param("decode", marks=pytest.mark.slow), "store"])
def test_benchmarks_of_kernels_measure_every_preset_and_bfloat16(script, wall_clock, monkeypatch, tmp_path):
    sizes = {
        "decode": ["--shapes", "1,4/1,64,100", "--masked-shapes", "1,4/2,64,320", "--visible", 70],
        "store": ["--context", 128, "--batches", 1, 2, "--num-kv-heads", 2, "--head-dim", 64],
    }
    assert run(monkeypatch, script, *sizes[script], "--output", tmp_path, "--tag", "test") == 0
    rows = Results.read(tmp_path / f"{script}-test-nothing-inc.json").rows
    formats, fully_packed = {"bfloat16", *kvcompile.preset_names()}, len(workloads.fully_packed_formats())
    if script == "store":  # only formats that keep no recent tokens exact
        formats = {name for name, _ in workloads.fully_packed_formats()}
    ours = [row for row in rows if row["format"] in formats]
    assert {row["format"] for row in ours} == formats
    assert len(ours) == {"decode": len(formats) + 2 * fully_packed, "store": 2 * 2 * 2 * fully_packed}[script]
    assert all(0 <= row["relative_error"] < workloads.MAX_ERROR for row in ours)
    assert all(row["of_read_ceiling"] == pytest.approx(row["megabytes"] * 1e6 / 1e-3 / 1e12) for row in rows)
    assert all(row.keys() <= COLUMNS.keys() for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler", "without_code_generation")
def test_keys_cached_after_and_before_rope_and_before_a_norm_are_checked_and_timed(wall_clock, monkeypatch, tmp_path):
    sizes = ["--shapes", "1,4/2,64,128", "--formats", "int8_per_token_head", "turboquant_4bit_nc", "--layers", 2]
    assert run(monkeypatch, "computed_keys", *sizes, "--output", tmp_path, "--tag", "test") == 0
    rows = Results.read(tmp_path / "computed_keys-test-nothing-inc.json").rows
    assert [row["format"] for row in rows] == ["plain", "int8_per_token_head", "turboquant_4bit_nc"] * 3
    assert len({row["megabytes"] for row in rows}) == 3
    assert all(row.keys() <= COLUMNS.keys() for row in rows)


def test_eager_operations_are_checked_and_timed_for_keys_and_values(wall_clock, monkeypatch, tmp_path):
    sizes = ["--shape", "3,4/2,64,192", "--new-tokens", 65, "--formats", "int4", "int8_per_token_head"]
    assert run(monkeypatch, "eager", *sizes, "--output", tmp_path, "--tag", "test") == 0
    rows = Results.read(tmp_path / "eager-test-nothing-inc.json").rows
    assert len(rows) == 2 * 2 * 4
    assert all(0 <= row["relative_error"] < workloads.MAX_ERROR for row in rows)
    monkeypatch.setattr(PackedTensor, "index_select", lambda cache, dim, index: cache)
    assert run(monkeypatch, "eager", *sizes, "--output", tmp_path, "--tag", "test") == 1
    rows = Results.read(tmp_path / "eager-test-nothing-inc.json").rows
    assert {row["case"] for row in rows if "error" in row} == {"index_select of sequences"}


def test_attention_on_latents_is_checked_and_compared_with_plain_latents(wall_clock, monkeypatch, tmp_path):
    assert run(monkeypatch, "latents", "--shapes", "2,4/1,512,70", "--output", tmp_path, "--tag", "test") == 0
    plain, ours = Results.read(tmp_path / "latents-test-nothing-inc.json").rows
    assert 0 <= ours["relative_error"] < workloads.MAX_ERROR
    assert (plain["megabytes"], ours["megabytes"]) == (2 * 70 * 1024 / 1e6, 2 * 70 * 584 / 1e6)
    shape = Shape(2, 4, 1, 512, 70)
    monkeypatch.setattr(latents, "attention", lambda query, *rest: query)
    with pytest.raises(ArithmeticError, match="is wrong: relative error"):
        latents.check_attention(shape.query(), latents.random_data(shape), shape.context)


def test_decode_steps_on_a_cpu_are_timed_for_each_context_and_number_of_threads(monkeypatch, tmp_path):
    timed = []

    def compile_step(module, run, shape, dtype, **arguments):
        options = arguments.get("options", {"policy": "plain"})
        timed.append((torch.get_num_threads(), shape.context, dtype, options["policy"]))
        return cpu_decode.CompiledStep(lambda: torch.zeros(1), llama.empty_cache(module.config, shape, dtype, CPU), 0.0)

    threads = torch.get_num_threads()
    monkeypatch.setattr(cpu_decode, "compile_step", compile_step)
    options = ["--shape", "1,2/1,16,64", "--contexts", 64, 128, "--threads", 1, 2, "--policies", "int4", "--layers", 1]
    options += ["--cases", "whole model", "--dtypes", "float32", "--repeats", 2, "--output", tmp_path, "--tag", "test"]
    try:
        assert run(monkeypatch, "cpu_decode", *options) == 0
    finally:
        torch.set_num_threads(threads)
    variants = [(count, context) for count in (1, 2) for context in (64, 128)]
    assert timed == [(*variant, torch.float32, policy) for variant in variants for policy in ("plain", "int4")]
    (path,) = tmp_path.glob("*.json")
    rows = Results.read(path).rows
    assert [row["threads"] for row in rows] == [count for count, *_ in timed]
    assert [row["shape"] for row in rows] == [f"(1, 2/1, 16, {context})" for _, context, *_ in timed]
    assert all(("speedup" in row) == (row["format"] == "int4") for row in rows)


def test_wrong_results_are_not_timed(monkeypatch):
    caches = Caches(SHAPE, INT8)
    inputs = (SHAPE.query(), *caches.random(1)[0])
    caches.check_attention(*inputs)
    right = Caches.attention
    for wrong in (
        lambda *arguments: right(*arguments) * 1.02,
        lambda *arguments: right(*arguments) * math.nan,
        lambda self, query, *rest: right(self, query.roll(1, 0), *rest),
        lambda self, query, k_data, v_data, *rest: right(self, query, k_data, v_data.roll(1, 2), *rest),
    ):
        monkeypatch.setattr(Caches, "attention", wrong)
        with pytest.raises(ArithmeticError, match="is wrong: relative error"):
            caches.check_attention(*inputs)


def test_a_store_that_leaves_out_a_token_is_not_timed(monkeypatch):
    layout = PackedLayout("int8_per_token_head", "key", 64)
    data = empty_packed(layout, 128, 2, 2, workloads.DEVICE)
    x, positions = store.strided_vectors(2, 2, 128, 64), torch.arange(128, device=workloads.DEVICE)
    assert store.check_store(layout, data, x, positions) < workloads.MAX_ERROR
    right = store.store
    monkeypatch.setattr(store, "store", lambda layout, data, x, p: right(layout, data, x[:, :, 1:], p[1:]))
    with pytest.raises(ArithmeticError, match=r"store of .* is wrong"):
        store.check_store(layout, data, x, positions)


@pytest.mark.parametrize(("q_len", "is_causal"), [(1, False), (3, False), (192, True), (3, True)])
@pytest.mark.parametrize("folded", [False, True])
def test_the_baseline_computes_attention(q_len, is_causal, folded):
    if is_causal and folded:
        pytest.skip("folded queries have no causal mask")
    query, (key, value) = SHAPE.query(q_len), SHAPE.key_and_value()
    mask = torch.ones(q_len, SHAPE.context, dtype=torch.bool, device=query.device)
    mask = mask.tril(SHAPE.context - q_len) if is_causal else mask
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), mask, enable_gqa=True)
    out = workloads.sdpa("flash", query, key, value, is_causal=is_causal, folded=folded)
    assert workloads.relative_error(out, expected) < 1e-2


def test_a_decode_step_is_checked_on_the_values_that_its_cache_holds():
    config = llama.config(SHAPE, num_layers=2, vocab_size=50)
    model = llama.random_model(config, torch.float32, workloads.DEVICE)
    ids = torch.zeros(SHAPE.batch, 1, dtype=torch.long, device=workloads.DEVICE)

    def step(model: Any, cache: transformers.StaticCache) -> torch.Tensor:
        return model(input_ids=ids, past_key_values=cache).logits

    cache = llama.random_cache(config, SHAPE, torch.float32, workloads.DEVICE)
    result = step(model, cache)
    assert [layer.cumulative_length.item() for layer in cache.layers] == [SHAPE.context] * 2, "all slots are visible"
    llama.rewind(cache)
    assert torch.equal(step(model, cache), result)
    assert llama.check_step(result, step, model, SHAPE, cache) < 1e-5
    assert llama.packed_layers(cache) == 0
    cache.layers[1].values.neg_()
    with pytest.raises(ArithmeticError, match="the decode step is wrong"):
        llama.check_step(result, step, model, SHAPE, cache)


def test_keys_are_quantized_before_or_after_their_rotary_embedding(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from keys_before_rope import divergence, predictions, quantizing

    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=32
    )
    model = transformers.LlamaForCausalLM(config).eval()
    window = torch.randint(64, (70,))
    expected = predictions(model, window)
    found = {}
    for before in (True, False):
        with quantizing(model, "int4_unrotated", before=before):
            found[before] = predictions(model, window)
        with quantizing(model, "float32", before=before):
            assert divergence(model, window[None], [expected]) == pytest.approx(0, abs=1e-6)
    assert torch.equal(predictions(model, window), expected)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations((expected, *found.values()), 2))
