"""The inputs and outputs of a graph that are caches."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcompile.passes.packing import Packing


@dataclass
class CacheUses:
    """The caches of a graph. Positions of inputs and outputs are counted as before the split of stacks.

    Attributes:
        inputs: the packed inputs, and the sites that read each input.
        outputs: the packed outputs, and the sites that read each output.
        grown: for each growing input, the output that extends it.
        dropped: the outputs that the rewritten graph does not compute, because it changes the corresponding inputs in
            place.
    """

    inputs: dict[int, set[int]] = field(default_factory=dict)
    outputs: dict[int, set[int]] = field(default_factory=dict)
    grown: dict[int, int] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, packing: Packing) -> CacheUses:
        """The caches of the accepted sites, before the graph is rewritten."""
        placeholders = {node: place for place, node in enumerate(packing.placeholders)}
        outputs = list(packing.gm.graph.output_node().args[0])
        uses = cls(dropped={place for place, node in enumerate(outputs) if node is None})
        whole_input = {place: stack.index for stack in packing.stacks for place in stack.places.values()}
        joined = [output for stack in packing.stacks for output in stack.returned]
        whole_output = {place: output.index for output in joined for place in output.places.values()}
        for site, candidate in enumerate(packing.candidates):
            for cache in candidate.caches if candidate.accepted else ():
                comes = placeholders.get(cache.base)
                comes = whole_input.get(comes, comes) if comes is not None else None
                returned = [place for place, node in enumerate(outputs) if node is not None and node is cache.returned]
                if comes is not None:
                    uses.inputs.setdefault(comes, set()).add(site)
                for place in returned:
                    goes = whole_output.get(place, place)
                    uses.outputs.setdefault(goes, set()).add(site)
                    if comes is not None:
                        uses.grown[comes] = goes
        return uses
