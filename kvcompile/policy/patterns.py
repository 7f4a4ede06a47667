"""Regular expressions for names of modules, with bounds on their time and memory.

A pattern is a regular expression of Python's ``re``. The package ``regex`` matches it, because ``re`` has no time
limit.
"""

from __future__ import annotations

import math
import re
import time

import regex

from kvcompile.errors import PolicyError, cut, shown

MAX_LENGTH = 1000
"""The maximum length of a pattern, in characters."""

MAX_TOGETHER = 30_000
"""The maximum length of all patterns of a policy together, in characters."""

MAX_COPIES = 100
"""The maximum product of the counts in braces, because a compiled pattern has a copy for each repetition."""

MAX_GROUPS = 100
"""The maximum number of opening parentheses. Deep groups take all of Python's stack."""

SECONDS = 0.5
"""The processor time for all patterns of a policy together."""

_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")

_NOT_LATIN = re.compile(r"(\\\\)|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|[^\x00-\xff]")
"""Characters beyond Latin-1. ``re`` takes milliseconds for each range of characters that ends at one of them, and a
pattern may have thousands of these ranges."""

_WRONG = (re.error, regex.error, RecursionError, OverflowError)


def check_pattern(pattern: str) -> None:
    """Raise PolicyError unless ``pattern`` is a regular expression of bounded size."""
    if (groups := pattern.count("(")) > MAX_GROUPS:
        raise PolicyError(f"{_named(pattern)} has {groups} opening parentheses; write at most {MAX_GROUPS}")
    try:
        re.compile(_NOT_LATIN.sub(lambda found: found[1] or "\xff", pattern))
    except _WRONG as error:
        raise _not_a_pattern(pattern, error) from None
    counts = [max(int(count or 1) for count in counts if count is not None) for counts in _counts(pattern)]
    if "{" in _COUNT.sub("", pattern) or math.prod(max(1, count) for count in counts) > MAX_COPIES:
        raise PolicyError(
            f"{_named(pattern)}: braces may only hold counts such as {{2}} or {{1,3}}, which multiply to at most "
            f"{MAX_COPIES}; write * or +"
        )
    try:
        regex.compile(pattern)
    except _WRONG as error:
        raise _not_a_pattern(pattern, error) from None


def _counts(pattern: str) -> list[tuple[str | None, ...]]:
    """The least and the largest count of every repetition in braces."""
    return [found.groups() for found in _COUNT.finditer(pattern)]


class Matcher:
    """Matches the patterns of one policy."""

    def __init__(self) -> None:
        self._seconds_left = SECONDS
        self._results: dict[tuple[str, str], bool] = {}

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a checked pattern matches a whole name.

        Raises:
            PolicyError: matching the patterns of the policy takes too long.
        """
        known = self._results.get((pattern, name))
        return self._timed(pattern, name) if known is None else known

    def _timed(self, pattern: str, name: str) -> bool:
        begin = time.thread_time()
        try:
            if self._seconds_left <= 0:
                raise TimeoutError
            found = regex.fullmatch(pattern, name, timeout=self._seconds_left) is not None
        except TimeoutError:
            raise PolicyError(
                f"{_named(pattern)} takes too long on {shown(name)}: the regular expressions of a policy have "
                f"{SECONDS} s together; write them without repetitions within repetitions"
            ) from None
        except RecursionError as error:  # little of Python's stack is left here
            raise _not_a_pattern(pattern, error) from None
        finally:
            self._seconds_left -= time.thread_time() - begin
        self._results[pattern, name] = found
        return found


def _not_a_pattern(pattern: str, error: Exception) -> PolicyError:
    return PolicyError(f"{_named(pattern)} is not a regular expression: {cut(str(error))}")


def _named(pattern: str) -> str:
    return shown(f"re:{pattern}")
