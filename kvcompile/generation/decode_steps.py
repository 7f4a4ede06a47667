"""The compiled decode steps of one model. On GPUs they are recorded as CUDA graphs, unless that cannot work."""

from __future__ import annotations

import threading
from typing import Any

import torch

from kvcompile.backend import ConfiguredBackend
from kvcompile.compat.cuda_graphs import may_come_from_recording
from kvcompile.compat.modules import uncompiled_call
from kvcompile.errors import KVCompileError, one_line
from kvcompile.report import report

RECORDING_DEVICES = ("cuda",)
"""The types of devices that have CUDA graphs."""

_GRAPHS = "triton.cudagraphs"
"""The setting of Inductor for CUDA graphs."""


class DecodeSteps:
    """Calls a model in compiled code, recorded as CUDA graphs or not."""

    def __init__(self, model: Any, backend: ConfiguredBackend, **how: Any) -> None:
        """
        Args:
            model: a model of Transformers.
            backend: compiles the model. Steps have the mode ``reduce-overhead`` unless the backend has a mode.
            how: further keywords of ``torch.compile``.
        """
        self._name, self._call = type(model).__name__, uncompiled_call(model)
        self._backend, self._how = backend, how
        recording = backend.with_mode("reduce-overhead")
        self._unrecorded, self._recorded = self._compiled(backend), self._compiled(recording)
        self._may_record = _records(recording)
        self._lock = threading.Lock()

    def _compiled(self, backend: ConfiguredBackend) -> Any:
        return torch.compile(self._call, backend=backend, **self._how)

    def begin_recording(self) -> bool:
        """Whether the caller may run recorded steps until it calls :meth:`end_recording`; only one at a time may.

        A step of another thread would overwrite the outputs of its steps.
        """
        return self._lock.acquire(blocking=False)

    def end_recording(self) -> None:
        self._lock.release()

    def never_record_states(self, states: list[str], device: torch.device) -> None:
        """No longer record steps of a model that keeps ``states`` in attributes of modules.

        A step would read them after the next replay has overwritten them.
        """
        if states and device.type in RECORDING_DEVICES:
            self._stop_recording(f"it keeps states in attributes of its modules, such as {states[0]}")

    def _stop_recording(self, reason: str) -> None:
        if not self._may_record:
            return
        self._may_record = False
        if _records(self._backend):
            self._unrecorded = self._compiled(self._backend.with_options({_GRAPHS: False}))
        report.note(f"decode steps of this {self._name} run without CUDA graphs: {reason}")

    def __call__(self, *args: Any, records: bool, **kwargs: Any) -> Any:
        """Run a step.

        Args:
            args, kwargs: the arguments of the model.
            records: whether the step may be recorded.

        Raises:
            KVCompileError: the step failed, perhaps because it was recorded. Later steps are not recorded. This one is
                not repeated, because a part of it may have changed the cache.
        """
        if not (records and self._may_record and kwargs["input_ids"].device.type in RECORDING_DEVICES):
            return self._unrecorded(*args, **kwargs)
        try:
            return self._recorded(*args, **kwargs)
        except KVCompileError:
            raise
        except Exception as error:
            if not may_come_from_recording(error):
                raise
            reason = f"{type(error).__name__}: {one_line(error)}"
            self._stop_recording(f"one failed ({reason})")
            raise KVCompileError(
                f"generate: a decode step of {self._name} failed with CUDA graphs, and later requests run without "
                f'them; compile the model with kvcompile.compile(model, mode="default") ({reason})'
            ) from error


def _records(backend: ConfiguredBackend) -> bool:
    return bool(backend.options.inductor_config.get(_GRAPHS))
