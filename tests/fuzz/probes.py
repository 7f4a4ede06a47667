"""All probes."""

from __future__ import annotations

from fuzz.probe import Probe
from fuzz.probes_of_caches import CACHES
from fuzz.probes_of_forms import FORMS
from fuzz.probes_of_prompts import PROMPTS
from fuzz.probes_of_sequences import SEQUENCES

PROBES: tuple[Probe, ...] = (*CACHES, *FORMS, *PROMPTS, *SEQUENCES)
