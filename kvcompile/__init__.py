"""kvcompile: ``torch.compile(model, backend="kvquant")`` keeps the KV cache packed inside the compiled graph.

Importing this package imports nothing else, not even torch; a public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcompile.version import VERSION

if TYPE_CHECKING:
    from kvcompile.backend import ConfiguredBackend as ConfiguredBackend
    from kvcompile.backend import kvquant as kvquant
    from kvcompile.caches.file import load_cache as load_cache
    from kvcompile.caches.file import save_cache as save_cache
    from kvcompile.caches.static import static_cache as static_cache
    from kvcompile.call.read_only import pack_ as pack_
    from kvcompile.compat.versions import UntestedVersionWarning as UntestedVersionWarning
    from kvcompile.compiling import compile as compile
    from kvcompile.compiling import uncompile as uncompile
    from kvcompile.debugging.debug import debug as debug
    from kvcompile.errors import CacheFileError as CacheFileError
    from kvcompile.errors import KVCompileError as KVCompileError
    from kvcompile.errors import OptionsError as OptionsError
    from kvcompile.errors import PackageError as PackageError
    from kvcompile.errors import PolicyError as PolicyError
    from kvcompile.errors import UnsupportedSiteError as UnsupportedSiteError
    from kvcompile.evaluation.compare import compare as compare
    from kvcompile.evaluation.comparison import Comparison as Comparison
    from kvcompile.evaluation.tune import tune as tune
    from kvcompile.evaluation.tuning import Tuning as Tuning
    from kvcompile.explaining import explain as explain
    from kvcompile.explaining import verify as verify
    from kvcompile.packaging.load import PackagedStep as PackagedStep
    from kvcompile.packaging.load import load_package as load_package
    from kvcompile.packaging.package import package as package
    from kvcompile.packed.memory import cache_nbytes as cache_nbytes
    from kvcompile.packed.pool import PackedPool as PackedPool
    from kvcompile.packed.shard import PackedShard as PackedShard
    from kvcompile.packed.stack import PackedRanges as PackedRanges
    from kvcompile.packed.stack import PackedStack as PackedStack
    from kvcompile.packed.tensor import PackedTensor as PackedTensor
    from kvcompile.parallel.reports import report_of_ranks as report_of_ranks
    from kvcompile.policy.policy import Policy as Policy
    from kvcompile.policy.presets import preset_names as preset_names
    from kvcompile.report.report import Report as Report
    from kvcompile.report.report import collect_reports as collect_reports
    from kvcompile.report.report import last_report as last_report

__version__ = VERSION

_HOME = {
    "CacheFileError": "errors",
    "Comparison": "evaluation.comparison",
    "ConfiguredBackend": "backend",
    "KVCompileError": "errors",
    "OptionsError": "errors",
    "PackageError": "errors",
    "PackagedStep": "packaging.load",
    "PackedPool": "packed.pool",
    "PackedShard": "packed.shard",
    "PackedRanges": "packed.stack",
    "PackedStack": "packed.stack",
    "PackedTensor": "packed.tensor",
    "Policy": "policy.policy",
    "PolicyError": "errors",
    "Report": "report.report",
    "Tuning": "evaluation.tuning",
    "UnsupportedSiteError": "errors",
    "UntestedVersionWarning": "compat.versions",
    "cache_nbytes": "packed.memory",
    "collect_reports": "report.report",
    "compare": "evaluation.compare",
    "compile": "compiling",
    "debug": "debugging.debug",
    "explain": "explaining",
    "kvquant": "backend",
    "last_report": "report.report",
    "load_cache": "caches.file",
    "load_package": "packaging.load",
    "pack_": "call.read_only",
    "package": "packaging.package",
    "preset_names": "policy.presets",
    "report_of_ranks": "parallel.reports",
    "save_cache": "caches.file",
    "static_cache": "caches.static",
    "tune": "evaluation.tune",
    "uncompile": "compiling",
    "verify": "explaining",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
