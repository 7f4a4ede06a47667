"""The checks of ``kvcompile doctor``. Each names its finding, and the remedy if something is wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import operator
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcompile.compat.versions import numbers, untested
from kvcompile.errors import PolicyError

if TYPE_CHECKING:
    import torch

PACKAGE = Path(__file__).parent.parent
"""The folder of the package ``kvcompile``."""

OK = "ok"
NOTE = "note"
"""Something optional is missing, or was not tested."""
MISSING = "missing"
"""Something required is missing or does not work."""

_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Check:
    """One result. ``status`` is OK, NOTE or MISSING; ``remedy`` is empty if there is nothing to do."""

    name: str
    status: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Device:
    """A device, and the code that the backend runs there."""

    name: str
    description: str
    runs: str


def check_all() -> list[Check]:
    """All checks. Each depends only on the checks before it."""
    python = Check("python", OK, ".".join(map(str, sys.version_info[:3])))
    checks = [python, _kvcompile(), _torch()]
    if checks[-1].status == MISSING:
        return checks
    checks.append(_package("triton", required=_has_gpu()))
    checks.extend(_gpus())
    checks.append(_compiler())
    checks.append(_backend())
    checks.append(_package("depyf", required=False, purpose="only dumps of compiled code need it"))
    checks.append(_package("transformers", required=False, purpose="only Hugging Face models need it"))
    checks.extend(_policy_variable())
    return checks


def devices() -> list[Device]:
    """All devices of this machine, GPUs first."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        what, why, _ = _standing(torch.device("cuda", index))
        runs = "Triton kernels store and read packed caches" if why is None else "caches stay plain"
        found.append(Device(f"cuda:{index}", what, runs))
    threads = f"{torch.get_num_threads()} threads"
    return [*found, Device("cpu", threads, "C++ that Inductor generates stores and reads packed caches")]


def _kvcompile() -> Check:
    try:
        return Check("kvcompile", OK, f"{importlib.metadata.version('kvcompile')} in {PACKAGE}")
    except importlib.metadata.PackageNotFoundError:
        return Check("kvcompile", MISSING, str(PACKAGE), "not installed, so PyTorch cannot find it: pip install -e .")


def _torch() -> Check:
    """Whether PyTorch can be imported, and whether kvcompile was tested with this release."""
    check = _package("torch", required=True)
    newer = untested(check.found) if check.status == OK else None
    return check if newer is None else Check("torch", NOTE, check.found, newer)


def _package(name: str, required: bool, purpose: str = "") -> Check:
    """Whether a package can be imported, and in a version that kvcompile's metadata allows."""
    absent = MISSING if required else NOTE
    wanted = declared_versions(name)
    install = f"pip install '{name}{wanted}'" + (f" ({purpose})" if purpose else "")
    try:
        found = importlib.metadata.version(name)
        importlib.import_module(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, absent, "not installed", install)
    except Exception as error:  # a broken installation may raise anything, and the user must see it
        return Check(name, absent, f"{type(error).__name__}: {error}", f"it cannot be imported; {install}")
    if not in_range(found, wanted):
        return Check(name, absent, f"{found}, not {wanted}", install)
    return Check(name, OK, found)


def declared_versions(package: str) -> str:
    """The versions of a package that kvcompile's metadata allows, e.g. ``>=5.17,<6``; "" without a declaration."""
    try:
        requirements = importlib.metadata.requires("kvcompile") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for requirement in requirements:
        match = re.match(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)", requirement)
        if match is not None and match[1].lower() == package:
            return match[2].strip()
    return ""


def in_range(version: str, wanted: str) -> bool:
    """Whether the release of ``version`` satisfies ``wanted``: comparisons separated by commas; "" allows all."""
    for comparison in filter(None, (part.strip() for part in wanted.split(","))):
        match = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*([\d.]+)", comparison)
        if match is None or not _COMPARISONS[match[1]](numbers(version), numbers(match[2])):
            return False
    return True


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpus() -> Iterator[Check]:
    import torch

    if not _has_gpu():
        built = "" if torch.version.cuda or torch.version.hip else "; this PyTorch is built without CUDA"
        yield Check("GPU", NOTE, f"none{built}", "everything will run on the CPU")
    for index in range(torch.cuda.device_count()):
        found, why, standing = _standing(torch.device("cuda", index))
        if why is not None:
            yield Check("GPU", NOTE, found, f"{why}; caches on this GPU stay plain")
        elif standing == "tested":
            yield Check("GPU", OK, found)
        else:
            known = "was compiled for such a GPU, but not tested on one" if standing == "compiled" else "was not tested"
            yield Check("GPU", NOTE, found, f"kvcompile {known}: check it with `python -m kvcompile doctor --try`")


def _standing(device: torch.device) -> tuple[str, str | None, str]:
    """The name of a GPU, the reason why it is refused or None, and what is known about it."""
    import torch

    from kvcompile.kernels.lang.gpus import architecture_of, standing_of, why_unsupported

    architecture = architecture_of(device)
    kind = architecture if architecture.startswith("gfx") else f"compute capability {architecture}"
    name = torch.cuda.get_device_properties(device).name
    return f"{name}, {kind}", why_unsupported(device), standing_of(device)


_PROGRAM = "#include <Python.h>\n#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n"


def _compiler() -> Check:
    """Whether Inductor's C++ compiler works and finds Python's headers. Triton's launchers need both as well."""
    remedy = "install a C++ compiler (apt install g++), or name one in the environment variable CXX"
    try:
        from kvcompile.compat.compiler import cpp_compiler

        compiler = cpp_compiler()
        found = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except Exception as error:  # from Inductor, or from starting the compiler
        return Check("C++ compiler", MISSING, f"{type(error).__name__}: {str(error).splitlines()[0]}", remedy)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "check.cpp")
        source.write_text(_PROGRAM)
        include = f"-I{sysconfig.get_path('include')}"
        done = subprocess.run(
            [compiler, "-std=c++17", "-fsyntax-only", include, str(source)], capture_output=True, text=True
        )
    version = found.splitlines()[0] if found else compiler
    if done.returncode == 0:
        return Check("C++ compiler", OK, version)
    reason = next((line for line in done.stderr.splitlines() if "error" in line), "cannot compile")
    return Check("C++ compiler", MISSING, version, f"{reason}; Python's headers are in the package python3-dev")


def _backend() -> Check:
    """Whether ``torch.compile(model, backend="kvquant")`` finds and imports the backend."""
    import torch._dynamo

    if "kvquant" not in torch._dynamo.list_backends():
        remedy = "install kvcompile (pip install -e .), which registers its entry point"
        return Check("backend kvquant", MISSING, "not in torch._dynamo.list_backends()", remedy)
    try:
        backend = torch._dynamo.lookup_backend("kvquant")
    except Exception as error:  # the import may raise anything
        return Check("backend kvquant", MISSING, f"{type(error).__name__}: {error}", "the backend cannot be imported")
    return Check("backend kvquant", OK, f"{backend.__module__}.{backend.__qualname__}")


def _policy_variable() -> Iterator[Check]:
    """Whether the environment variable KVQUANT_POLICY names a policy, if it is set."""
    from kvcompile.policy.policy import POLICY_VARIABLE, Policy

    value = os.environ.get(POLICY_VARIABLE)
    if value:
        try:
            Policy.load(None)
        except PolicyError as error:
            yield Check(POLICY_VARIABLE, MISSING, value, str(error))
        else:
            yield Check(POLICY_VARIABLE, OK, value)
