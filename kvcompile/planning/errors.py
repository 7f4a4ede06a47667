"""The planner's errors."""

from __future__ import annotations

from kvcompile.errors import InputError


class PlanError(InputError):
    """A plan cannot be made: the message names the config's field or the argument, and the remedy."""


class NoRoomError(PlanError):
    """The weights and the reserve leave no memory for a cache."""
