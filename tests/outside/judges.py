"""All judges: test modules of other projects, and the ways in which each of them runs."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outside.plugin import Way
from outside.running import TestRun, run_module
from outside.verdict import Verdict, compare
from outside.ways_modules import LITGPT, TORCHTUNE
from outside.ways_transformers import PLAIN, by_compile, by_config, by_packing

LOSSY = "int8_per_token_head"


@dataclass(frozen=True)
class Judge:
    """A test module of another project.

    Attributes:
        name: the project, and the model or the tests.
        source: the folder of the project among the sources.
        path: the test module in that folder.
        plain: how the tests run for comparison.
        ways: how they run on packed caches.
        marked: only tests with one of these marks run; without marks, all.
        keywords: only tests that match this expression of pytest's option ``-k`` run; if empty, all.
    """

    name: str
    source: str
    path: str
    plain: Way
    ways: tuple[Way, ...]
    marked: tuple[str, ...] = ()
    keywords: str = ""

    def verdicts(self, sources: Path, logs: Path | None = None) -> Iterator[Verdict]:
        """Run the tests plainly, and then in each way. A test that breaks runs once more in both."""
        plain = self._run(sources, self.plain, logs)
        for way in self.ways:
            packed, expected = self._run(sources, way, logs), plain
            broken = frozenset(compare(self.name, str(way), plain, packed, way.known).broken)
            if broken & set(packed):  # some tests are known to be flaky, and say so
                packed = packed | self._run(sources, way, logs, broken)
                expected = plain | self._run(sources, self.plain, logs, broken)
            yield compare(self.name, str(way), expected, packed, way.known)

    def _run(
        self, sources: Path, way: Way, logs: Path | None, named: frozenset[str] = frozenset()
    ) -> dict[str, TestRun]:
        log = logs / f"{self.name}, {way}.txt".replace("/", " ") if logs is not None else None
        return run_module(sources / self.source, self.path, way, self.marked, named, self.keywords, log)


CACHE_TESTS = (
    Judge("transformers, test_cache_utils", "transformers", "tests/utils/test_cache_utils.py", PLAIN, (by_packing(),)),
    *(
        Judge(f"torchtune, {Path(path).stem}", "torchtune", f"tests/torchtune/{path}", TORCHTUNE.plain(), ways)
        for path, ways in (
            ("modules/test_kv_cache.py", (TORCHTUNE.by_packing(),)),
            ("generation/test_generation.py", (TORCHTUNE.by_packing(),)),
        )
    ),
    *(
        Judge(f"litgpt, {path}", "litgpt", f"tests/{path}.py", LITGPT.plain(), ways, keywords="cache or input_pos")
        for path, ways in (
            ("test_multihead_latent_attention", (LITGPT.by_packing(),)),
            ("test_model", (LITGPT.by_packing(), LITGPT.by_compile())),
        )
    ),
)


def model_judges(sources: Path, names: Sequence[str] = ()) -> list[Judge]:
    """The tests of text generation of Transformers' models; of all models whose tests generate, if none is named."""
    folder = sources / "transformers" / "tests" / "models"
    paths = {path.parent.name: path for path in sorted(folder.glob("*/test_modeling_*.py")) if _is_main(path)}
    generating = [name for name, path in paths.items() if _generates(path)]
    return [
        Judge(
            f"transformers, {name}",
            "transformers",
            f"tests/models/{name}/test_modeling_{name}.py",
            PLAIN,
            (by_config(), by_compile(), by_compile(LOSSY)),
            ("generate",),
        )
        for name in names or generating
    ]


def _is_main(path: Path) -> bool:
    return path.stem == f"test_modeling_{path.parent.name}"


def _generates(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return "GenerationTesterMixin" in text or "CausalLMModelTest" in text or "VLMModelTest" in text


def preload(sources: Path) -> None:
    """Import the modules that all tests of Transformers' models share, so that each process need not."""
    root = sources / "transformers"
    sys.path.insert(0, str(root))
    with contextlib.chdir(root):
        for name in ("tests.test_modeling_common", "tests.causal_lm_tester", "tests.test_pipeline_mixin"):
            importlib.import_module(name)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
