"""``python -m kvcompile eval``: its measurements, and its messages about mistakes."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from documented_commands import commands
from node_by_node import running_node_by_node
from small_models import CONTEXT, HEAD_DIM, MODULES, give_outlier_keys, save, small_model, some_bytes
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.errors import MAX_MESSAGE
from kvcompile.evaluation.attention_sites import AttentionTap, sites_of_tap
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.models import load_model
from kvcompile.evaluation.replay import Step
from kvcompile.evaluation.results import Evaluation
from kvcompile.evaluation.results_text import exact_tokens, layers
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.step_comparison import StepComparison
from kvcompile.evaluation.text import Text, read_text
from kvcompile.passes.site import FormatPair
from kvcompile.policy.policy import Policy
from kvcompile.policy.presets import PRESETS
from kvcompile.tables import WIDTH

PREFILL, DECODE, CHUNK = 64, 8, 4
READING = f"--prefill {PREFILL} --decode {DECODE} --chunk {CHUNK} --windows 2"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(small_model(num_layers=1), folder)
    return folder


@pytest.fixture(autouse=True)
def folder(saved_model: Path, monkeypatch: pytest.MonkeyPatch, without_code_generation: None) -> Path:
    """The working directory: the folder of a model."""
    monkeypatch.chdir(saved_model)
    return saved_model


def run(command: str, code: int = 0) -> tuple[str, str]:
    """The output of a command on stdout and stderr."""
    result = CliRunner().invoke(app, shlex.split(command), prog_name="kvcompile")
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def cells(text: str) -> dict[str, list[str]]:
    """The cells of each row of all tables, by the first cell of the row."""
    rows = [split(line) for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


# Measurements


@pytest.fixture(scope="module")
def results(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of the command on two policies, and the folder of its results and its plot."""
    folder = tmp_path_factory.mktemp("results")
    policies = "int8_per_token_head,turboquant_3bit_nc"
    files = f"--output {folder}/quality.json --plot {folder}/quality.svg"
    with pytest.MonkeyPatch.context() as patch, running_node_by_node(operators=True):
        patch.chdir(saved_model)
        return run(f"eval --model . --policies {policies} --layers {files} {READING}")[0], folder


@pytest.mark.slow
def test_the_command_compares_the_compiled_model_with_itself(results: tuple[str, Path]) -> None:
    out, files = results
    assert max(map(len, out.splitlines())) <= WIDTH
    found = json.loads((files / "quality.json").read_text())
    assert (found["metric"], found["tokens"], found["reference_bits"]) == ("bits per byte", 2 * (PREFILL + DECODE), 32)
    assert found["reference"] == pytest.approx(bits_per_byte_without_a_cache(), rel=1e-5)
    int8, three_bits = found["results"]
    for result, bytes_per_pair in ((int8, 2 * 36), (three_bits, 14 + 16)):
        blocks = 2  # 72 tokens take two blocks of 64
        assert result["effective_bits"] == 8 * bytes_per_pair * 64 * blocks / (2 * HEAD_DIM * (PREFILL + DECODE))
        assert result["packed_layers"] == result["num_layers"] == 1
        assert result["quality"] == pytest.approx(found["reference"] * (1 + result["change"]))
        assert list(result["attention_errors"]) == [MODULES[0]]
        assert result["policy"] in cells(out)
        assert result["policy"] in (files / "quality.svg").read_text()
        assert result["notes"] == []
    assert 0 < int8["mean_divergence"] < three_bits["mean_divergence"] / 100
    assert int8["p999_divergence"] >= int8["median_divergence"] > 0
    assert int8["same_top1"] > three_bits["same_top1"]
    assert 0.001 < int8["attention_errors"][MODULES[0]] < 0.02
    assert 0.05 < three_bits["attention_errors"][MODULES[0]] < 0.3


@pytest.fixture(scope="module")
def with_exact_tokens(saved_model: Path) -> str:
    """The output of the command on policies of which two keep tokens in full precision."""
    with pytest.MonkeyPatch.context() as patch, running_node_by_node(operators=True):
        patch.chdir(saved_model)
        return run(f"eval --model . --policies turboquant_3bit,turboquant_3bit_r128,int4 {READING}")[0]


@pytest.mark.slow
def test_tokens_in_full_precision_count_as_a_share_of_the_window(
    results: tuple[str, Path], with_exact_tokens: str
) -> None:
    assert max(map(len, with_exact_tokens.splitlines())) <= WIDTH
    rows = cells(with_exact_tokens)
    packed = 8 * (3 * HEAD_DIM / 8 + 2) / HEAD_DIM * 128 / (PREFILL + DECODE)  # 72 tokens take two blocks of 64
    plain, exact = rows["turboquant_3bit"], rows["turboquant_3bit_r128"]
    assert (plain[:3], exact[:3]) == (["0", "0.0%", f"{packed:.2f}"], ["128", "100.0%", f"{packed:.2f}"])
    assert exact[3:5] == [f"{packed + 16 * 128 / tokens:.2f}" for tokens in (8192, 32768)]
    assert plain[3:5] == 2 * [f"{packed:.2f}"]
    assert float(exact[6]) < float(plain[6]) / 100, "all tokens that a later step reads are exact"
    only_keys = 64 / (PREFILL + DECODE) / 2
    assert rows["int4"][:2] == ["32", f"{100 * only_keys:.1f}%"], "a block of keys, and no values"
    assert "exact" not in results[0], "neither policy keeps tokens in full precision"


@pytest.mark.slow
def test_a_note_says_that_a_window_of_exact_tokens_measures_no_format(with_exact_tokens: str) -> None:
    out = " ".join(with_exact_tokens.split())
    note = f"all {PREFILL + DECODE} tokens of a window are in full precision, so later steps read no packed token"
    assert f"note: turboquant_3bit_r128: {note}; give a larger --prefill" in out
    assert out.count(note) == 1


def split(line: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_an_exact_prompt_loses_nothing_before_later_steps_which_read_their_own_tokens_packed(tmp_path: Path) -> None:
    """Later steps read their own tokens packed, whatever their length; here they are as long as the prompt."""

    def measured(options: str) -> tuple[str, dict[str, Any]]:
        file, reading = tmp_path / "quality.json", "--prefill 64 --decode 64 --chunk 64 --windows 1"
        out, _ = run(f"eval --model . --policies turboquant_3bit_nc --output {file} {options} {reading}")
        (result,) = json.loads(file.read_text())["results"]
        return out, result

    (exact, prompt), (packed, quantized) = measured("--exact-prompt"), measured("")
    assert "exact prefill of" in exact
    assert "exact prefill of" not in packed
    assert quantized["prefill_divergence"] > 1e-5
    assert prompt["prefill_divergence"] < 1e-9
    assert prompt["decode_divergence"] > 1e-5


def bits_per_byte_without_a_cache() -> float:
    model = small_model(num_layers=1)
    text = read_text(model, ".", None, Schedule(PREFILL, DECODE, CHUNK), 2)
    with torch.no_grad():
        logits = model(input_ids=text.windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), text.windows[:, 1:].flatten()).item() / math.log(2)


def test_divergence_top1_and_attention_error_follow_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, exact = torch.randn(2, 7, 11, generator=generator)
    targets = torch.randint(11, (7,), generator=generator)
    output, exact_output = torch.randn(2, 7, 5, generator=generator)
    compared = StepComparison()
    for part in (slice(0, 3), slice(3, 7)):
        step, reference = (Step(part, x[part], {"a": y[part]}) for x, y in ((logits, output), (exact, exact_output)))
        compared.add(step, reference, targets[part])
    p, q = exact.softmax(-1), logits.softmax(-1)
    torch.testing.assert_close(torch.cat(compared.divergence).float(), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(torch.cat(compared.nats).float(), F.cross_entropy(logits, targets, reduction="none"))
    assert torch.equal(torch.cat(compared.same_top), p.argmax(-1) == q.argmax(-1))
    expected = ((output - exact_output).norm() / exact_output.norm()).item()
    assert compared.attention.errors() == {"a": pytest.approx(expected)}


@pytest.mark.parametrize("schedule", [Schedule(5, 6, 2), Schedule(1, 1, 1), Schedule(64, 3)])
def test_every_token_but_the_first_of_a_window_is_predicted_once(schedule: Schedule) -> None:
    steps = schedule.steps()
    assert steps[0] == slice(0, schedule.prefill)
    assert {step.stop - step.start for step in steps[1:]} == {schedule.chunk}
    assert [i for step in steps for i in range(step.start, step.stop)] == list(range(schedule.num_tokens))
    assert schedule.window_tokens == schedule.num_tokens + 1


def test_windows_are_spread_from_the_first_byte_to_the_last() -> None:
    text = read_text(small_model(), ".", None, Schedule(10, 2), 3)
    assert text.in_bytes
    data = some_bytes(2000)
    assert text.source == "val.bin"
    assert [bytes(window.tolist()) for window in text.windows] == [data[:13], data[993:1006], data[-13:]]


def test_a_model_with_a_tokenizer_reads_its_tokens_and_has_a_perplexity(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    words = {word: index for index, word in enumerate(("a", "b", "c", "[UNK]"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("a b c a d")
    text = read_text(small_model(vocab_size=4), str(tmp_path), tmp_path / "text.txt", Schedule(3, 1), 1)
    assert text.source == "text.txt", "results say no more of where it lies"
    assert text.windows.tolist() == [[0, 1, 2, 0, 3]]
    assert (text.metric, text.quality(2.0)) == ("perplexity", math.exp(2))
    assert text.relative_change(2.0, 0.1) == pytest.approx(math.exp(2.1) / math.exp(2) - 1)


def test_a_change_of_bits_per_byte_is_relative() -> None:
    text = Text("", torch.empty(0), Schedule(), in_bytes=True)
    assert text.quality(math.log(2)) == 1
    assert text.relative_change(2.0, 0.1) == pytest.approx(0.05)


def test_attention_is_observed_with_the_keys_that_it_reads(folder: Path) -> None:
    model, tokens, heard = small_model(), torch.arange(9), {}
    tap = AttentionTap(model)
    tap(tokens, lambda site, call: heard.update({site.module: call.key}))
    cache = model(input_ids=tokens[None], use_cache=True).past_key_values
    assert list(heard) == list(MODULES)
    assert [site.module for site in sites_of_tap(tap, tokens)] == list(MODULES)
    for layer, keys in zip(cache.layers, heard.values(), strict=True):
        torch.testing.assert_close(keys[:, :: keys.shape[1] // 2], layer.keys)


# The examples of the help and of the documentation, and mistakes


def test_the_examples_run_up_to_the_evaluation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples run up to the evaluation, which the tests above cover, on a model with few positions."""
    evaluated: list[tuple[Schedule, list[str]]] = []

    def evaluate(model: Any, text: Text, policies: list[str], **arguments: Any) -> Evaluation:
        evaluated.append((text.schedule, policies))
        return Evaluation("m", text.source, text.metric, 1, 1, 1, 1, 2, "float32", "cpu", 8.0, 32.0)

    monkeypatch.setattr("kvcompile.evaluation.measure.evaluate", evaluate)
    (folder / "policy.yaml").write_text("version: 1\ndefault: {dtype: int8_per_token_head}\n")
    (folder / "text.txt").write_bytes(some_bytes(300))
    examples = [line.partition("kvcompile ")[2] for line in run("eval --help")[0].splitlines() if "    python" in line]
    pages = [command.partition("kvcompile ")[2] for command in commands("console")]
    examples += [re.sub(r"--model \S+", "--model .", command) for command in pages if command.startswith("eval ")]
    for example in examples:
        assert "none: float32" in cells(run(f"{example} --prefill 16 --decode 8")[0])
    assert evaluated[:3] == [
        (Schedule(16, 8, 1), ["int8_per_token_head", "turboquant_4bit_nc"]),
        (Schedule(16, 8, 8), ["policy.yaml"]),
        (Schedule(16, 8, 1), ["fp8_e4m3"]),
    ]
    assert evaluated[3:] == [
        (Schedule(16, 8, 1), ["int8_per_token_head", "turboquant_4bit_nc"]),
        (Schedule(16, 8, 8), list(PRESETS)),
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--policies int9", "policy 'int9' is neither a preset nor a file"),
        ("--policies ,", "--policies: the list is empty"),
        ("--policies ''", "--policies: the list is empty; name presets or policy files, or leave the option out"),
        ("--decode 9 --chunk 4", "--decode 9 is not a multiple of --chunk 4"),
        ("--data nowhere.txt --prefill 8 --decode 8", "nowhere.txt: cannot be read: [Errno 2] No such file"),
        ("--data config.json --prefill 8 --decode 2000", f"make 2008 tokens, but the model reads at most {CONTEXT}"),
        ("--data short.txt --prefill 8 --decode 8", "short.txt: 3 tokens, but a window takes 17; give more text"),
        (
            "--windows 1000000000 --prefill 8 --decode 8",
            "val.bin gives at most 1984 different windows of 17 tokens",
        ),
        ("--device nonsense", "--device nonsense: "),
        (
            "--dtype float31",
            "--dtype: 'float31' is not a valid dtype; did you mean 'float32'? (write one of float32, bfloat16, ",
        ),
        ("--plot quality.txt", "--plot quality.txt: the name must end in .png, .svg or .pdf"),
        ("--plot nowhere/quality.png", "nowhere/quality.png: its folder does not exist"),
        ("--output .", ".: Is a directory"),
        ("--policies fp8_e4m3,int4_unrotated --promote p.yaml", "--promote changes one policy, and --policies names 2"),
    ],
)
def test_mistakes_are_plain_lines(folder: Path, command: str, message: str) -> None:
    (folder / "short.txt").write_text("abc")
    out, err = run(f"eval --model . {command}", code=2)
    assert out == ""
    assert err.startswith("kvcompile: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_folder_without_a_model_is_a_mistake_in_one_line(tmp_path: Path) -> None:
    _, err = run(f"eval --model {tmp_path}", code=2)
    assert err.startswith(f"kvcompile: error: --model {tmp_path}: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    ["eval", "compare", "tune --budget-bits 4.5", "calibrate --output t.safetensors", "calibrate --output t.json"],
)
def test_a_file_in_place_of_a_model_is_named_with_what_to_give_instead(command: str, tmp_path: Path) -> None:
    """Transformers would read the config as weights, and advise to load them without safety."""
    for file in (Path("config.json"), tmp_path / "weights.txt"):
        (tmp_path / "weights.txt").write_text("weights")
        out, err = run(f"{command} --model {file}", code=2)
        assert out == ""
        assert err == (
            f"kvcompile: error: --model {file}: it is a file, and a model needs weights; give the folder that has the "
            "model's config.json and weights, or its name on the Hugging Face hub\n"
        )


@pytest.mark.timeout(15)
@pytest.mark.parametrize("command", ["eval", "explain"])
def test_a_name_is_no_model_if_the_hub_does_not_answer(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked once; its own client would ask for 20 seconds."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    _, err = run(f"{command} --model no_such_folder", code=2)
    assert err.startswith("kvcompile: error: --model no_such_folder: no such folder, not among the files downloaded ")
    assert "the Hugging Face hub does not answer (" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["my model", "a/b/c", "x" * 5000])
def test_a_name_that_cannot_be_on_the_hub_is_not_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("kvcompile.evaluation.models.hub_failure")
    with pytest.raises(EvaluationError, match="no such folder, and not a valid name on the Hugging Face hub") as caught:
        load_model(name)
    assert len(str(caught.value)) <= MAX_MESSAGE


def test_files_that_were_downloaded_before_are_found_while_the_hub_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--model" / "snapshots" / ("0" * 40)
    save(small_model(num_layers=1), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    assert load_model("owner/model", "cpu").config.num_hidden_layers == 1


def test_other_models_need_a_text(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="give one with --data FILE"):
        read_text(small_model(vocab_size=300), str(tmp_path), None, Schedule(8, 8), 1)
    with pytest.raises(EvaluationError, match=r"there is no .*val.bin; give a text with --data FILE"):
        read_text(small_model(), str(tmp_path), None, Schedule(8, 8), 1)


# Outlier keys


def test_promote_raises_the_layers_with_outlier_keys_and_names_the_unchanged_layers(tmp_path: Path) -> None:
    save(give_outlier_keys(small_model(), 16), tmp_path)
    rules = [{"match": {"layers": "0"}, "dtype": "auto"}]
    (tmp_path / "policy.json").write_text(json.dumps({"rules": rules, "default": {"dtype": "turboquant_4bit_nc"}}))
    command = f"eval --model {tmp_path} --policies {tmp_path}/policy.json --promote {tmp_path}/promoted.yaml"
    found: Any = json.loads(run(f"{command} {READING} --windows 1 --json")[0])
    policy = Policy.load(tmp_path / "promoted.yaml")
    assert policy.formats_for(MODULES[0], 0, 2) is None
    assert policy.formats_for(MODULES[1], 1, 2) == FormatPair("fp8_e4m3", "int4_unrotated")
    (result,) = found["results"]
    assert result["policy"] == f"{tmp_path}/promoted.yaml"
    assert result["formats"] == ["fp8_e4m3 / int4_unrotated"]
    assert result["notes"] == [f"{MODULES[0]} not packed: the policy says auto for this layer"]
    assert (result["packed_layers"], result["num_layers"]) == (1, 2)
    assert result["effective_bits"] > 16
    assert result["attention_errors"][MODULES[0]] < 1e-6 < result["attention_errors"][MODULES[1]]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("eval --model ./nowhere", "--model ./nowhere: no such folder; give a folder with a model, or its name on"),
        (
            "calibrate --model . --output x.txt",
            "--output x.txt: the name must end in .safetensors (transforms) or .json",
        ),
    ],
)
def test_wrong_paths_are_named_before_anything_is_read(folder: Path, command: str, message: str) -> None:
    out, err = run(command, code=2)
    assert out == ""
    assert err.startswith(f"kvcompile: error: {message}")
    assert len(err.splitlines()) == 1
    assert not (folder / "x.txt").exists()


def test_the_error_of_one_window_is_unknown_and_its_place_is_blank() -> None:
    result = SimpleNamespace(
        policy="int4",
        exact_tokens=32.0,
        exact_share=0.25,
        packed_bits=4.5,
        prefill_divergence=1e-3,
        decode_divergence=2e-3,
    )
    evaluation = SimpleNamespace(prefill=64, decode=64, results=[result])
    for error, shown in ((float("nan"), ""), (1e-4, "1.0e-4")):
        result.decode_divergence_error = error
        row = cells(exact_tokens(cast(Evaluation, evaluation)))["int4"]
        assert row[-3:] == ["1.0e-3", "2.0e-3", shown]


def test_tables_name_a_policy_file_without_its_folder_unless_two_have_one_name() -> None:
    def names(*policies: str) -> list[str]:
        results = [SimpleNamespace(policy=policy, attention_errors={}) for policy in policies]
        return next(iter(cells(layers(cast(Evaluation, SimpleNamespace(results=results)))).values()))

    assert names("int4", "/a/long/folder/policy.yaml") == ["int4", "policy.yaml"]
    assert names("a/policy.yaml", "b/policy.yaml") == ["a/policy.yaml", "b/policy.yaml"]
