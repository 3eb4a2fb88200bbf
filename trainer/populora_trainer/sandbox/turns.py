"""Whose turn it is where many wait for few workers: each party gets an equal share of the workers' time.

This is start-time fair queueing with runs whose length is known only when they end: a run counts as a whole timeout
while it lasts, and as what it took afterwards. Programs that hang use up the share of who sent them, and whoever comes
with quick ones waits for the run that is going on, not for those that are queued.

Source: Goyal, Vin and Cheng, "Start-time fair queueing" (SIGCOMM 1996).
"""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

Party = TypeVar("Party", bound=Hashable)


@dataclass(eq=False, slots=True)
class _Tally(Generic[Party]):
    """What one party has had.

    Attributes:
        spent: seconds of its runs that have ended, not less than what the least served had when it began to wait.
        running: runs that are going on.
        entry: number of the entry in the heap that counts; earlier ones are out of date.
    """

    party: Party
    spent: float = 0.0
    running: int = 0
    waiting: bool = False
    leaves: bool = False
    entry: int = 0


class Turns(Generic[Party]):
    """Orders parties by the time they have had; every operation takes logarithmic time."""

    def __init__(self, charge: float) -> None:
        """Begin with no party.

        Args:
            charge: seconds that a run counts as while it lasts.
        """
        self._charge = charge
        self._served = 0.0  # what the party of the latest turn had had before
        self._tallies: dict[Party, _Tally[Party]] = {}
        self._heap: list[tuple[float, int, _Tally[Party]]] = []
        self._entries = count(1)

    def __len__(self) -> int:
        return len(self._tallies)

    def put(self, party: Party) -> None:
        """Let a party wait; it has no claim to time from before it waited."""
        tally = self._tallies.get(party)
        if tally is None:
            tally = self._tallies[party] = _Tally(party)
        tally.leaves = False
        if not tally.waiting:
            tally.waiting = True
            tally.spent = max(tally.spent, self._served)
            self._push(tally)

    def first(self) -> Party | None:
        """Return whose turn it is, None where nobody waits."""
        while self._heap:
            _, entry, tally = self._heap[0]
            if tally.waiting and tally.entry == entry:
                return tally.party
            heapq.heappop(self._heap)
        return None

    def drop(self, party: Party) -> None:
        """Note that a party waits no more; what it has had is kept."""
        if tally := self._tallies.get(party):
            tally.waiting = False

    def begin(self, party: Party) -> None:
        """Note that a run of a party has begun."""
        tally = self._tallies[party]
        self._served = max(self._served, tally.spent)
        tally.running += 1
        if tally.waiting:
            self._push(tally)

    def end(self, party: Party, seconds: float) -> None:
        """Note that a run of a party has ended, and what it took."""
        tally = self._tallies[party]
        tally.running -= 1
        tally.spent += seconds
        if tally.waiting:
            self._push(tally)
        elif tally.leaves and not tally.running:
            del self._tallies[party]

    def leave(self, party: Party) -> None:
        """Forget a party, as soon as none of its runs goes on."""
        if tally := self._tallies.get(party):
            tally.waiting, tally.leaves = False, True
            if not tally.running:
                del self._tallies[party]

    def _push(self, tally: _Tally[Party]) -> None:
        tally.entry = next(self._entries)
        heapq.heappush(self._heap, (tally.spent + self._charge * tally.running, tally.entry, tally))
        if len(self._heap) > 64 + 8 * len(self._tallies):  # mostly out of date
            self._heap = [entry for entry in self._heap if entry[2].waiting and entry[2].entry == entry[1]]
            heapq.heapify(self._heap)


Client = TypeVar("Client", bound=Hashable)


class ClientTurns(Generic[Client, Party]):
    """Turns among clients, and among the parties of each: many parties get a client no more time."""

    def __init__(self, charge: float) -> None:
        """Begin with no client; `charge` is that of `Turns`."""
        self._charge = charge
        self._clients: Turns[Client] = Turns(charge)
        self._parties: dict[Client, Turns[Party]] = {}

    def put(self, client: Client, party: Party) -> None:
        """Let a party of a client wait."""
        parties = self._parties.get(client)
        if parties is None:
            parties = self._parties[client] = Turns(self._charge)
        parties.put(party)
        self._clients.put(client)

    def first(self) -> Party | None:
        """Return whose turn it is, None where nobody waits."""
        while (client := self._clients.first()) is not None:
            if (party := self._parties[client].first()) is not None:
                return party
            self._clients.drop(client)
        return None

    def drop(self, client: Client, party: Party) -> None:
        """Note that a party waits no more."""
        if (parties := self._parties.get(client)) is not None:
            parties.drop(party)

    def begin(self, client: Client, party: Party) -> None:
        """Note that a run has begun."""
        self._clients.begin(client)
        self._parties[client].begin(party)

    def end(self, client: Client, party: Party, seconds: float) -> None:
        """Note that a run has ended, and what it took."""
        self._clients.end(client, seconds)
        self._parties[client].end(party, seconds)
        self._tidy(client)

    def leave(self, client: Client, party: Party) -> None:
        """Forget a party, as soon as none of its runs goes on, and its client with the last of them."""
        if (parties := self._parties.get(client)) is not None:
            parties.leave(party)
            self._tidy(client)

    def _tidy(self, client: Client) -> None:
        if not len(self._parties[client]):
            self._clients.leave(client)
            del self._parties[client]
