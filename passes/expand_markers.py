"""Stage B: give markers that stayed back to Inductor."""

from __future__ import annotations
