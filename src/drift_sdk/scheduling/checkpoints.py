"""The places that hold checkpoints of recurrent states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from drift_sdk.scheduling.prefix import PrefixNode
from drift_sdk.scheduling.sequence import KeptCheckpoint

__all__ = ["CheckpointPool"]

Holder = PrefixNode | KeptCheckpoint


class CheckpointPool:
    """The owner of every place of a checkpoint. A place is free, planned or held.

    A planned place belongs to a chunk in flight, which writes it. A held one belongs to a node of the prefix
    cache, or to a running sequence that has not published the node's block. A freed place can be allocated in
    the next plan, as blocks can: steps run in the order of their launch, so what was planned before reads the
    old content.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._holders: OrderedDict[Holder, None] = OrderedDict()  # least recently used first

    @property
    def num_held(self) -> int:
        """Places that are held."""
        return len(self._holders)

    def allocate(self) -> int | None:
        """Take a free place, else the one of the least recently used holder. None: all places are planned."""
        if self._free:
            return self._free.pop()

        return self.take(next(iter(self._holders))) if self._holders else None

    def free(self, place: int) -> None:
        """Return a planned place, or one that was taken from its holder."""
        self._free.append(place)

    def attach(self, holder: Holder, place: int) -> None:
        """Let a holder have a planned place, which counts as a use."""
        assert holder.checkpoint < 0, f"the place {place} for a holder of {holder.checkpoint}"
        holder.checkpoint = place
        self._holders[holder] = None

    def use(self, node: PrefixNode) -> None:
        """Count a use of a node's checkpoint."""
        self._holders.move_to_end(node)

    def take(self, holder: Holder) -> int:
        """Take the place of a holder, which has it no more."""
        del self._holders[holder]
        place, holder.checkpoint = holder.checkpoint, -1
        return place

    def check_integrity(self, holders: Iterable[Holder], planned: Iterable[int]) -> None:
        """Raise AssertionError unless every place has exactly one owner.

        holders: all nodes of the prefix cache, and what running sequences keep. planned: the places of chunks
        in flight.
        """
        having = [holder for holder in holders if holder.checkpoint >= 0]
        assert {*having} == {*self._holders}, "holders of checkpoints and their LRU order differ"
        owned = sorted([*self._free, *planned, *[holder.checkpoint for holder in having]])
        assert owned == [*range(self.num_places)], f"places free, planned or held: {owned}"
