"""Which requests may have ended a gang, and how that is found out.

What was running on the rank at fault is suspected. A suspect goes on alone among its like, one on each rank, until it
has come past the place where it was. So a request that ends its rank every time is found at the second death, and takes
nobody along.
"""

from launcher.death import Death
from launcher.gang_link import GangLink
from launcher.ticket import RequestPoisoned, Ticket

PROBATION_TOKENS = 3  # more than a rank can have computed beyond what the router had heard when it ended
MOST_DEATHS = 8  # of ranks that a request was running on, although it got over each of them


def suspect(ticket: Ticket, link: GangLink) -> None:
    """Its gang has ended under it; who was at fault will be known later."""
    ticket.died_with[link.key] = ticket.rank
    ticket.link = None
    ticket.suspect = True


def try_out(ticket: Ticket, link: GangLink, rank: int) -> None:
    """A suspect has been given a place."""
    link.probation[rank], ticket.probation = ticket, PROBATION_TOKENS


def free_ranks(link: GangLink, ticket: Ticket) -> list[int]:
    """Where a request may go: a suspect only where no other one is being tried."""
    return [rank for rank in range(link.world_size) if not ticket.suspect or rank not in link.probation]


def end_probation(ticket: Ticket) -> None:
    """It leaves its rank, or is an ordinary request there from now on."""
    link = ticket.link
    if link is not None and link.probation.get(ticket.rank) is ticket:
        del link.probation[ticket.rank]


def blame(ticket: Ticket, death: Death, max_strikes: int) -> RequestPoisoned | None:
    """One more death to its name. Returns what it fails with, if that was one too many."""
    ticket.deaths.append(death.reason)
    ticket.strikes += ticket.suspect  # it may have got over it meanwhile
    if ticket.strikes < max_strikes and len(ticket.deaths) < MOST_DEATHS:
        return None
    return RequestPoisoned(
        f"it was running on the rank at fault each time when its gang ended, {len(ticket.deaths)} times, so it is not "
        f"tried again ({'; '.join(dict.fromkeys(ticket.deaths))})"
    )
