"""The errors that users can act on; each message names the thing, the place and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_MESSAGE = 280
"""The maximum length of a message about an input of the user, in characters."""


class KVCompileError(Exception):
    """Base of every error that kvcompile raises on purpose."""


class InputError(KVCompileError, ValueError):
    """An input of the user is wrong. The message is one line of at most 280 characters, whatever the input."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(" ".join(message.splitlines()), MAX_MESSAGE))


class PolicyError(InputError):
    """A policy is wrong: the message names the file, the rule and the field.

    Attributes:
        faults: a line of at most 280 characters for each fault. The message has the first one.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = tuple(cut(fault, MAX_MESSAGE) for fault in faults)
        others = f" (and {plural(len(faults) - 1, 'more fault')})" if len(faults) > 1 else ""
        super().__init__(cut(faults[0], MAX_MESSAGE - len(others)) + others)


class OptionsError(InputError):
    """``mode`` or ``options`` of ``torch.compile`` is wrong: the message names it and lists the valid names."""


class AliasedCacheError(KVCompileError):
    """A compiled graph writes one of two packed caches with shared storage; the other might not show the write."""


class CacheFileError(InputError):
    """A cache cannot be saved, or a file cannot be loaded as a cache: the message names the place and the remedy."""


class PackageError(InputError):
    """A step cannot be packaged, or a package cannot be loaded or called: the message says why."""


class UnsupportedSiteError(KVCompileError):
    """An attention site cannot use a packed cache, and ``on_unsupported`` is ``error``.

    Attributes:
        module: qualified name of the module that calls attention, "" at top level.
        reason: why the site was refused.
        remedy: what the user can do about it.
    """

    def __init__(self, module: str, reason: str, remedy: str) -> None:
        self.module = module
        self.reason = reason
        self.remedy = f"{remedy}; or give this module `dtype: auto` in the policy, or set on_unsupported to warn"
        super().__init__(f"{module or 'attention at top level'}: {reason}; {self.remedy}")


def cut(text: str, most: int = 120) -> str:
    """``text``, without its middle part if it is longer than ``most`` characters, so that a message stays one line."""
    half = most // 2 - 3
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def one_line(text: object) -> str:
    """The text of an error of another library as one line, cut as by :func:`cut`."""
    return cut(" ".join(str(text)[:2000].split()))


def shown(value: object) -> str:
    """The ``repr`` of a user's value for a message, cut to 60 characters."""
    text = repr(value[:200] if isinstance(value, str) else value)
    return cut(text, 60)


def plural(count: int, noun: str) -> str:
    """A number of things: ``1 window``, ``2 windows``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def check_callable(model: object, caller: str) -> None:
    """Raise OptionsError unless ``model`` can be compiled; ``caller`` is the function that the user called."""
    check_made(model, caller)
    if not callable(model):
        raise OptionsError(
            f"{caller}: expected a module or a function, got {type(model).__name__}; load the model first"
        )


def check_made(model: object, caller: str) -> None:
    """Raise OptionsError if ``model`` is a class.

    ``torch.compile`` accepts a class and replaces its methods. The process may crash when the class is used later.
    """
    if isinstance(model, type):
        raise OptionsError(f"{caller}: expected a model, got the class {cut(model.__name__)}; make the model first")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` if a known name is close to ``name``, else the empty string.

    A close name either looks like ``name`` or starts with it, as ``int4_per_token_head`` does with ``int4``.
    """
    known, name = list(known), name[:100]
    close = [candidate for candidate in known if len(name) > 2 and candidate.startswith(name)]
    close = close or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
