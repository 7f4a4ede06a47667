"""Rewriting an ATen graph: the passes, and with the option ``verify`` the check of their result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from kvcompile.call.inputs import mismatch
from kvcompile.compat.graphs import copied_graph
from kvcompile.compat.observing import dynamo_timed
from kvcompile.compat.tracing import own_outputs
from kvcompile.debugging.stages import GraphStages, Stage
from kvcompile.options import BackendOptions
from kvcompile.passes.calling import GraphInput
from kvcompile.passes.graph.modules import sites_of
from kvcompile.passes.packing import Packing
from kvcompile.passes.pipeline import run
from kvcompile.passes.prove.candidate import Candidate
from kvcompile.passes.refusal import Reason, Refusal
from kvcompile.passes.rewrite.merge_projections import MayBeAdjacent
from kvcompile.verification.check import VERIFY, verify
from kvcompile.verification.dump import write_dump


@dataclass
class GraphRewriter:
    """Rewrites the ATen graph of one Dynamo graph.

    Attributes:
        options: the options of the backend.
        inputs: what is known of each input of Dynamo's graph.
        example_inputs: the example inputs of Dynamo's graph, in the same order.
        stages: shows the stages of the graph to ``kvcompile.debug``.
        may_be_adjacent: whether the caller can keep some inputs adjacent; None if projections are not merged.
        verified_steps: the number of random steps on which the rewritten graph agreed with the original; 0 if it
            differed, None if it was not checked.
    """

    options: BackendOptions
    inputs: Sequence[GraphInput]
    example_inputs: list[Any]
    stages: GraphStages
    may_be_adjacent: MayBeAdjacent | None = None
    verified_steps: int | None = None

    def rewrite(self, gm: GraphModule, example_inputs: Sequence[Any], static: set[int], cudagraphs: bool) -> Packing:
        """Run the passes on ``gm``, which changes; refuse all its sites if its inputs do not match Dynamo's inputs.

        Args:
            gm: functional ATen graph with markers.
            example_inputs: its fake inputs, in the order of its placeholders.
            static: the indices of the inputs whose addresses never change.
            cudagraphs: whether Inductor is asked to record the graph as a CUDA graph.
        """
        inputs = [replace(known, is_static=index in static) for index, known in enumerate(self.inputs)]
        refused: dict[int, Refusal] = {}
        own = own_outputs(len(gm.graph.output_node().args[0]))

        def fresh(gm: GraphModule) -> Packing:
            policy, shard = self.options.policy, self.options.shard
            return Packing(
                gm, list(example_inputs), inputs, policy.formats_for, cudagraphs, shard, policy.prefill == "exact", own,
                dict(refused),
            )  # fmt: skip

        difference = mismatch(inputs, self.example_inputs, example_inputs)
        if difference is not None:
            return self._refused(fresh(gm), Refusal(Reason.input_mismatch, detail=difference))
        before = copied_graph(gm) if self.options.verify else None
        packing = self._rewritten(fresh(gm))
        while before is not None and packing.rewritten is not None:
            wrong = self._wrong_sites(before, fresh, packing)
            if not wrong:
                break
            refused |= wrong
            seconds, gm.graph = packing.seconds[VERIFY], copied_graph(before).graph
            packing = self._rewritten(fresh(gm))
            packing.seconds[VERIFY] = seconds
        if packing.rewritten is not None:
            self.stages.show(Stage.rewritten, gm, packing.sites)
        return packing

    def _refused(self, packing: Packing, refusal: Refusal) -> Packing:
        packing.candidates = [Candidate(site) for site in sites_of(packing.gm)]
        for site in packing.sites:
            site.refuse(refusal)
        self.stages.show(Stage.aten, packing.gm, packing.sites)
        return packing

    def _rewritten(self, packing: Packing) -> Packing:
        packing.may_be_adjacent = self.may_be_adjacent  # not for the check, whose random weights are not adjacent
        for step in run(packing):
            self.stages.passed(step, packing)
        return packing

    def _wrong_sites(
        self, before: GraphModule, fresh: Callable[[GraphModule], Packing], packing: Packing
    ) -> dict[int, Refusal]:
        """The sites whose rewrite differs from the original graph, or cannot be checked."""
        with dynamo_timed(f"kvquant_{VERIFY}"):
            verdict = verify(before, fresh, fresh(before).inputs, self.example_inputs)
        packing.seconds[VERIFY] = packing.seconds.get(VERIFY, 0.0) + verdict.seconds
        self.verified_steps = verdict.steps if not verdict.mismatches else 0
        if verdict.impossible is not None:
            return dict.fromkeys(verdict.pair.rewrite.accepted, Refusal(Reason.not_verified, detail=verdict.impossible))
        if not verdict.mismatches:
            return {}
        dump = write_dump(verdict, self.options.policy)
        return {
            site: Refusal(Reason.differs, what=found.what, detail=found.detail, dump=dump)
            for site, found in verdict.wrong.items()
        }
