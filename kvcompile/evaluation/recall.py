"""Numbers that are planted in a text and asked for later: a test of retrieval from the cache.

Each number has a separate line, ``# number qzkfma = 48213``, in the part of a window that the prefill reads. The later
steps read the same line again, so the model has to predict the digits. Each window has one number in each of ``count``
equal parts of the prefill, and asks for them in a random order.
"""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.text import Planted, Text

DISTANCES = tuple(512 * 4**i for i in range(12))
"""The upper bounds of the distance groups, in tokens. The last one is beyond every context."""

NUM_DIGITS = 5


@dataclass(frozen=True)
class Recalled:
    """The planted numbers of one distance group that a model has retrieved.

    Attributes:
        distance: the upper bound of the group, in tokens between a number and its answer.
        questions: the number of questions.
        recalled: the fraction of answers in which every token is the model's most likely token.
        reference: this fraction for the unquantized model.
        divergence: mean Kullback-Leibler divergence from the unquantized model at the tokens of the answers, in nats.
    """

    distance: int
    questions: int
    recalled: float
    reference: float
    divergence: float


def number_line(source: random.Random) -> tuple[str, str]:
    """A random line ``# number NAME = DIGITS``: the text before the digits, and the digits."""
    name = "".join(source.choices(string.ascii_lowercase, k=6))
    return f"\n# number {name} = ", "".join(source.choices(string.digits, k=NUM_DIGITS))


def plant_numbers(text: Text, count: int, encode: Callable[[str], Sequence[int]], seed: int = 0) -> Text:
    """The text with ``count`` numbers in the prefill of each window, and questions for them in the later steps.

    Args:
        text: from :func:`kvcompile.evaluation.text.read_text`.
        count: the number of planted numbers in a window.
        encode: the tokens of a string.
        seed: the seed of names, digits, places and order.

    Raises:
        EvaluationError: the numbers do not fit into the prefill, or the questions into the later steps.
    """
    source, schedule = random.Random(seed), text.schedule
    if count > schedule.prefill:
        raise EvaluationError(
            f"--recall {count}: a prefill of {schedule.prefill} tokens has no place for {count} numbers; give fewer"
        )
    windows = text.windows.clone()
    question = torch.full((len(windows), schedule.num_tokens), -1)
    distance = torch.zeros(len(windows), count, dtype=torch.int64)
    for index, window in enumerate(windows):
        lines = [tuple(map(encode, (*number_line(source), "\n"))) for _ in range(count)]
        lengths = [sum(map(len, line)) for line in lines]
        part = schedule.prefill // count
        if max(lengths) > part:
            raise EvaluationError(
                f"--recall {count}: a number takes {max(lengths)} tokens, but a prefill of {schedule.prefill} has only "
                f"{part} for each; give a larger --prefill"
            )
        if sum(lengths) > schedule.decode:
            raise EvaluationError(
                f"--recall {count}: the questions take {sum(lengths)} tokens, but only {schedule.decode} are read "
                "after the prefill; give a larger --decode"
            )
        places = [i * part + source.randint(0, part - length) for i, length in enumerate(lengths)]
        for place, line in zip(places, lines, strict=True):
            _write(window, place, line)
        place = schedule.prefill
        for number in source.sample(range(count), count):
            _write(window, place, lines[number])
            answer = place + len(lines[number][0])
            question[index, answer - 1 : answer - 1 + len(lines[number][1])] = number
            distance[index, number] = place - places[number]
            place += lengths[number]
    return dataclasses.replace(text, windows=windows, planted=Planted(question, distance))


def _write(window: Tensor, place: int, line: Sequence[Sequence[int]]) -> None:
    tokens = torch.tensor([token for part in line for token in part])
    window[place : place + len(tokens)] = tokens


def recalled(planted: Planted, right: Tensor, reference_right: Tensor, divergence: Tensor) -> tuple[Recalled, ...]:
    """The planted numbers that a model has retrieved, by distance.

    Args:
        planted: the questions.
        right, reference_right: bool [num_windows, num_tokens], whether the most likely token is the next one.
        divergence: float [num_windows, num_tokens].
    """
    answers = []
    for window, number in planted.distance.nonzero().tolist():
        at = planted.question[window] == number
        answers.append(
            (
                int(planted.distance[window, number]),
                bool(right[window, at].all()),
                bool(reference_right[window, at].all()),
                float(divergence[window, at].mean()),
            )
        )
    results, nearest = [], 0
    for farthest in DISTANCES:
        among = [answer[1:] for answer in answers if nearest < answer[0] <= farthest]
        if among:
            means = (sum(column) / len(among) for column in zip(*among, strict=True))
            results.append(Recalled(farthest, len(among), *means))
        nearest = farthest
    return tuple(results)
