"""``doctor`` finds the faults of an installation, and reports none in a correct installation."""

from __future__ import annotations

import functools
import json
import re
import shlex
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvcompile.cli import doctor_checks
from kvcompile.cli.app import app
from kvcompile.compat import versions

compiler_checked_once = functools.cache(doctor_checks._compiler)


@pytest.fixture(autouse=True)
def _no_policy_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVQUANT_POLICY", raising=False)


@pytest.fixture(autouse=True)
def _compiler_checked_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ compiler translates its program once for all tests, except the test that takes the compiler away."""
    if request.function is not test_doctor_fails_without_a_compiler:
        monkeypatch.setattr(doctor_checks, "_compiler", compiler_checked_once)


def run(command: str, code: int = 0) -> str:
    """The output of a command on stdout."""
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def run_json(code: int = 0) -> dict[str, Any]:
    return json.loads(run("doctor --json", code))


def test_doctor_finds_this_machine_healthy_and_says_what_runs_where() -> None:
    data = run_json()
    assert data["healthy"] is True
    checks = {check["name"]: check for check in data["checks"]}
    assert {"python", "kvcompile", "torch", "GPU", "C++ compiler", "backend kvquant"} <= checks.keys()
    assert checks["backend kvquant"]["found"] == "kvcompile.backend.kvquant"
    assert data["devices"][-1]["name"] == "cpu"
    out = run("doctor")
    assert "C++ that Inductor generates" in out


def failing(data: dict[str, Any]) -> dict[str, str]:
    """The remedies of failed checks, by name."""
    assert data["healthy"] is False
    return {check["name"]: check["remedy"] for check in data["checks"] if check["status"] == "missing"}


def test_doctor_fails_for_a_version_of_torch_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor_checks.importlib.metadata.version
    monkeypatch.setattr(
        doctor_checks.importlib.metadata, "version", lambda name: "2.10.1" if name == "torch" else version(name)
    )
    remedies = failing(run_json(code=1))
    assert remedies.keys() == {"torch"}
    assert "pip install 'torch" in remedies["torch"]


def test_doctor_notes_that_a_newer_torch_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor_checks.importlib.metadata.version
    monkeypatch.setattr(
        doctor_checks.importlib.metadata, "version", lambda name: "99.0.0" if name == "torch" else version(name)
    )
    (check,) = [check for check in run_json()["checks"] if check["name"] == "torch"]
    assert check["status"] == "note"
    assert "newer than" in check["remedy"]


@pytest.mark.parametrize(
    ("why", "standing", "status", "remedy", "runs"),
    [
        (None, "tested", "ok", "", "Triton kernels"),
        (None, "compiled", "note", "was compiled for such a GPU, but not tested on one", "Triton kernels"),
        (None, "not compiled", "note", "kvcompile was not tested", "Triton kernels"),
        ("kernels need 8.0", "refused", "note", "kernels need 8.0; caches on this GPU stay plain", "caches stay plain"),
    ],
)
def test_doctor_says_what_is_known_about_a_gpu(
    why: str | None, standing: str, status: str, remedy: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor_checks, "_has_gpu", lambda: True)
    monkeypatch.setattr(doctor_checks, "_standing", lambda device: ("a GPU", why, standing))
    data = run_json()
    (check,) = [check for check in data["checks"] if check["name"] == "GPU"]
    assert (check["status"], check["found"]) == (status, "a GPU")
    assert remedy in check["remedy"]
    assert data["devices"][0]["runs"].startswith(runs)


def test_doctor_lists_the_tested_releases() -> None:
    out, data = run("doctor"), run_json()
    for release, triton, *_ in versions.rows():
        assert re.search(rf"\| {re.escape(release)} +\| {re.escape(triton)} ", out)
    assert [one["torch"] for one in data["tested"]] == [one.torch for one in versions.TESTED]


def test_doctor_fails_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    remedies = failing(run_json(code=1))
    assert remedies.keys() == {"C++ compiler"}
    assert "CXX" in remedies["C++ compiler"]


def test_doctor_fails_if_pytorch_does_not_find_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._dynamo.list_backends", lambda: ["inductor"])
    remedies = failing(run_json(code=1))
    assert remedies.keys() == {"backend kvquant"}
    assert "pip install -e ." in remedies["backend kvquant"]


def test_doctor_fails_for_a_policy_in_the_environment_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQUANT_POLICY", "nowhere.yaml")
    assert "nowhere.yaml" in failing(run_json(code=1))["KVQUANT_POLICY"]


def test_optional_packages_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor_checks.importlib.metadata.version

    def without_depyf(name: str) -> str:
        if name == "depyf":
            raise doctor_checks.importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor_checks.importlib.metadata, "version", without_depyf)
    out = run("doctor")
    assert re.search(r"^note +depyf +not installed$", out, re.MULTILINE)
    assert "pip install 'depyf>=" in out


@pytest.mark.parametrize(
    ("version", "wanted", "admitted"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.11.0", "<2.14,>=2.11", True),
        ("2.11", ">=2.11.0", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.14.0a0+git", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11", False),
        ("3.6.0", "==3.6", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, wanted: str, admitted: bool) -> None:
    assert doctor_checks.in_range(version, wanted) is admitted


def test_the_range_of_torch_is_the_one_that_the_package_declares() -> None:
    wanted = doctor_checks.declared_versions("torch")
    assert doctor_checks.in_range("2.13.0", wanted)
    assert not doctor_checks.in_range("2.10.0", wanted)
    assert doctor_checks.in_range("99.0.0", wanted)
    assert doctor_checks.declared_versions("no-such-package") == ""
