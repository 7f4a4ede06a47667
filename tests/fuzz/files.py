"""Random changes of files that users get from others: each gives a right result, or an error of one line."""

from __future__ import annotations

import contextlib
import copy
import functools
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.file_kinds import FIXED_NAMES, KINDS, Kind

SECONDS = 20
"""The longest time in which a file must be read."""

RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class")
"""Audit events that no file may cause."""

_NUMBERS = (0, 1, -1, 2, 63, 64, 65, 1.0, 0.5, -0.0, 2**31, 2**63, 10**30, 1e300, float("inf"), float("nan"))
_PLACES = st.integers(0, 1 << 20)


@dataclass(frozen=True)
class ByteEdit:
    """``length`` bytes from ``place`` on, modulo the size of the file, become ``new``."""

    place: int
    length: int
    new: bytes

    def apply(self, content: bytes) -> bytes:
        place = self.place % (len(content) + 1)
        return content[:place] + self.new + content[place + self.length :]


@dataclass(frozen=True)
class TreeEdit:
    """A change of the node number ``place``, modulo their count, of a tree of JSON: ``new`` takes its place.

    ``form`` is ``replace``; ``remove``, which ignores ``new``; or ``add``, which keeps the node, and adds ``new`` after
    it or under another name.
    """

    place: int
    form: str
    new: Any

    def apply(self, tree: Any) -> Any:
        root = [copy.deepcopy(tree)]
        nodes = list(_nodes(root))
        parent, key = nodes[self.place % len(nodes)]
        if self.form == "replace":
            parent[key] = self.new
        elif self.form == "remove" and parent is not root:
            del parent[key]
        elif isinstance(parent, list):
            parent.insert(key + 1, self.new)
        else:
            parent[f"{key}_"] = self.new
        return root[0]


def _nodes(parent: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
        yield parent, key
        if isinstance(parent[key], (dict, list)):
            yield from _nodes(parent[key])


Edits = tuple[ByteEdit, ...] | tuple[TreeEdit, ...]

_pieces = st.sampled_from([b"", b"[", b"{", b'"', b": ", b"\n", b"\0", b"\xff", b"1e999", b"-9", b"null", b"true"])
_byte_edit = st.builds(ByteEdit, _PLACES, st.integers(0, 40), _pieces | st.binary(max_size=8))
byte_edits = st.lists(_byte_edit, min_size=1, max_size=4).map(tuple)

_scalars = st.none() | st.booleans() | st.sampled_from(_NUMBERS) | st.sampled_from(FIXED_NAMES) | st.text(max_size=5)
_dicts = functools.partial(st.dictionaries, st.text(max_size=3), max_size=2)
_values = st.recursive(_scalars, lambda x: st.lists(x, max_size=3) | _dicts(x))
_tree_edit = st.builds(TreeEdit, st.integers(0, 255), st.sampled_from(["replace", "remove", "add"]), _values)
tree_edits = st.lists(_tree_edit, min_size=1, max_size=3).map(tuple)


class BadFile(AssertionError):
    """A file that is read wrongly, or whose error has several lines."""


@functools.cache
def _valid(kind: Kind) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"valid{kind.suffix}")
        kind.write(path)
        content = path.read_bytes()
    return content if kind.edit_tree is None else kind.edit_tree(content, lambda tree: tree)  # in one order


def check(name: str, edits: Edits) -> str:
    """Read a valid file of the kind ``name`` after ``edits``.

    Returns:
        ``read`` or ``refused``.

    Raises:
        BadFile: the file is read wrongly, too slowly, with an error of another class, or with a long message.
    """
    kind = KINDS[name]
    content = _valid(kind)
    if edits and isinstance(edits[0], TreeEdit):
        assert kind.edit_tree is not None
        content, signed = kind.edit_tree(content, functools.partial(_apply, edits)), True
    else:
        content, signed = _apply(edits, content), False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"changed{kind.suffix}")
        path.write_bytes(content)
        try:
            with _within(SECONDS), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = kind.read(path)
        except kind.error as error:
            _check_message(kind, str(error).replace(folder, ""))
            return "refused"
        except OSError as error:
            _check_message(kind, str(error))
            return "refused"
        except Exception as error:
            raise BadFile(f"{type(error).__name__}: {error}\n{_as_test(name, edits)}") from error
        if fault := kind.fault(result, signed):
            raise BadFile(f"read as valid, but {fault}\n{_as_test(name, edits)}")
    return "read"


def _apply(edits: Edits, content: Any) -> Any:
    for edit in edits:
        content = edit.apply(content)
    return content


def _check_message(kind: Kind, message: str) -> None:
    lines = message.splitlines()
    if not 1 <= len(lines) <= kind.most_lines or max(map(len, lines)) > 400:
        raise BadFile(f"a message of {len(lines)} lines and {len(message)} characters: {message[:500]}")


def _as_test(name: str, edits: Edits) -> str:
    return f"check({name!r}, {edits!r})"


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Raise RuntimeError in a ``with`` block that takes longer; only in a main thread on systems with SIGALRM."""

    def stop(*_: Any) -> None:
        raise RuntimeError(f"reading takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def search(name: str, number: int, count: int, counts: Counter[str] | None = None) -> None:
    """Check ``count`` changed files of a kind; the same ``number`` draws the same changes.

    Raises:
        BadFile: of the smallest change that Hypothesis finds.
    """
    edits = byte_edits if KINDS[name].edit_tree is None else byte_edits | tree_edits
    counts = Counter() if counts is None else counts

    @settings(
        max_examples=count,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @seed(number)
    @given(edits)
    def each(edits: Edits) -> None:
        counts[check(name, edits)] += 1

    each()


def search_until(is_over: Callable[[], bool], first_seed: int) -> int:
    """Check files of all kinds, seed after seed; prints the counts and returns the number of failures."""
    _refuse_to_run_code()
    counts = {name: Counter[str]() for name in KINDS}
    failures, number = 0, first_seed
    while not is_over():
        for name, found in counts.items():
            try:
                search(name, number, 100, found)
            except BadFile as error:
                failures += 1
                print(f"seed {number}, {name}: {error}\n", flush=True)
        number += 1
    for name, found in counts.items():
        print(f"{name}: {found.total()} files, {found['read']} read, {found['refused']} refused")
    print(f"{failures} failures; seeds {first_seed} to {number - 1}")
    return failures


def _refuse_to_run_code() -> None:
    """From now on this process starts no program and unpickles no class."""

    def hook(event: str, _: Any) -> None:
        if event in RUNS_CODE:
            raise RuntimeError(f"a file caused the audit event {event}")

    sys.addaudithook(hook)
