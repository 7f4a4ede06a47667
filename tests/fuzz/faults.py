"""All faults, in the order of the table in docs/fuzzing.md."""

from __future__ import annotations

from fuzz.fault import Fault
from fuzz.faults_of_analysis import ANALYSIS
from fuzz.faults_of_forms import FORMS
from fuzz.faults_of_rewrite import REWRITE
from fuzz.faults_of_sequences import SEQUENCES

FAULTS: tuple[Fault, ...] = (*ANALYSIS, *REWRITE, *FORMS, *SEQUENCES)
