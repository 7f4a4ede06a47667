"""kvcompile: ``torch.compile(model, backend="kvquant")`` keeps the KV cache packed inside the compiled graph.

Importing this package imports nothing else, not even torch; a public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcompile.cache_file import load_cache as load_cache
    from kvcompile.cache_file import save_cache as save_cache
    from kvcompile.debugging import debug as debug
    from kvcompile.errors import CacheFileError as CacheFileError
    from kvcompile.errors import KVCompileError as KVCompileError
    from kvcompile.errors import OptionsError as OptionsError
    from kvcompile.errors import PolicyError as PolicyError
    from kvcompile.errors import UnsupportedSiteError as UnsupportedSiteError
    from kvcompile.evaluation.comparison import Comparison as Comparison
    from kvcompile.evaluation.comparison import compare as compare
    from kvcompile.evaluation.tuning import Tuning as Tuning
    from kvcompile.evaluation.tuning import tune as tune
    from kvcompile.explaining import explain as explain
    from kvcompile.memory import cache_nbytes as cache_nbytes
    from kvcompile.packed_pool import PackedPool as PackedPool
    from kvcompile.packed_stack import PackedStack as PackedStack
    from kvcompile.packed_static_cache import static_cache as static_cache
    from kvcompile.packed_tensor import PackedTensor as PackedTensor
    from kvcompile.policy import Policy as Policy
    from kvcompile.presets import preset_names as preset_names
    from kvcompile.report import Report as Report
    from kvcompile.report import collect_reports as collect_reports
    from kvcompile.report import last_report as last_report

_HOME = {
    "CacheFileError": "errors",
    "Comparison": "evaluation.comparison",
    "KVCompileError": "errors",
    "OptionsError": "errors",
    "PackedPool": "packed_pool",
    "PackedStack": "packed_stack",
    "PackedTensor": "packed_tensor",
    "Policy": "policy",
    "PolicyError": "errors",
    "Report": "report",
    "Tuning": "evaluation.tuning",
    "UnsupportedSiteError": "errors",
    "cache_nbytes": "memory",
    "collect_reports": "report",
    "compare": "evaluation.comparison",
    "debug": "debugging",
    "explain": "explaining",
    "last_report": "report",
    "load_cache": "cache_file",
    "preset_names": "presets",
    "save_cache": "cache_file",
    "static_cache": "packed_static_cache",
    "tune": "evaluation.tuning",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
