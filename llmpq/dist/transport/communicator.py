"""Communicator: how a rank exchanges frames with the others.

Every rank sends to the next one of a ring and receives from the previous one; the last stage
answers to the master. An implementation guarantees that the frames of a link arrive complete,
checked and in order, that ``send`` does not wait for the peer to be idle, and that no call outlasts
a peer that died or hangs. ``transport.rendezvous`` connects the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmpq.dist.transport.frames import Frame


class Communicator(Protocol):
    """One rank's view of a ring.

    Attributes:
        rank: of this process or thread.
        names: of all ranks of the run, in messages.
        ranks: of this ring, in the order of sending, the master first.
    """

    rank: int
    names: Sequence[str]
    ranks: Sequence[int]

    def send(self, frame: Frame) -> None:
        """Start sending to the next rank; the frame's tensor must not change any more.

        Raises:
            StageError: the peer is gone.
        """
        ...

    def has_frame(self) -> bool:
        """Return whether ``recv`` would return or raise at once."""
        ...

    def await_frame(self, longest_s: float) -> bool:
        """Wait until ``recv`` would return or raise at once; return whether it would."""
        ...

    def recv(self) -> Frame:
        """Return the next frame of the previous rank, waiting for it.

        Its tensor may be a view of a buffer that the next frame is received into: it is valid until
        the next call of any of these three.

        Raises:
            StageError: the peer is gone, hangs, or sent something that is not a frame.
        """
        ...

    def close(self) -> None:
        """Finish sending and close the connections."""
        ...
