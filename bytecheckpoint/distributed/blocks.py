"""Divides the ranks of a group into blocks of consecutive ranks, each with a leader that passes messages on, and gives
the keys of these messages in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COORDINATOR = 0
"""The rank that plans and commits."""


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """Blocks of `block_ranks` consecutive ranks, as one rank sees them."""

    rank: int
    num_ranks: int
    block_ranks: int

    @property
    def leaders(self) -> range:
        """The first rank of each block; the first leader is the coordinator."""
        return range(0, self.num_ranks, self.block_ranks)

    @property
    def leader(self) -> int:
        """The leader of this rank's block."""
        return self.leader_of(self.rank)

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    @property
    def are_several(self) -> bool:
        return self.num_ranks > self.block_ranks

    def leader_of(self, rank: int) -> int:
        return rank - rank % self.block_ranks

    def members(self, leader: int) -> range:
        """Returns the ranks of a block without its leader."""
        return range(leader + 1, min(leader + self.block_ranks, self.num_ranks))

    def senders(self, reader: int) -> Sequence[int]:
        """Returns the ranks that send messages to a leader: its members, and to the coordinator the other leaders."""
        return [*self.members(reader), *(self.leaders[1:] if reader == COORDINATOR else ())]


def up_key(number: int, rank: int) -> str:
    """Returns the key of a message of one rank to its leader."""
    return f"up/{number}/{rank}"


def block_key(number: int, leader: int) -> str:
    """Returns the key of the messages of a block to the coordinator."""
    return f"up/{number}/{block_name(leader)}"


def arrivals_key(number: int, reader: int) -> str:
    """Returns the key that counts the messages for a reader."""
    return f"up/{number}/arrivals-{reader}"


def bell_key(number: int, reader: int) -> str:
    """Returns the key for which a reader waits: set with the last message for it, and by failures."""
    return f"up/{number}/bell-{reader}"


def down_key(number: int, reader: str) -> str:
    """Returns the key of a message of the coordinator to `reader`: a rank, the name of a block, or `all`."""
    return f"down/{number}/{reader}"


def block_name(leader: int) -> str:
    return f"block-{leader}"
