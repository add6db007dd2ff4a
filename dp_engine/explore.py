"""Explore the standard worlds: `python -m dp_engine.explore [--world NAME] [--list]`."""

import argparse
import sys
import time
from collections.abc import Mapping

from dp_engine.proof.explored import Cast, ExploredRank
from dp_engine.proof.standard_worlds import standard_worlds
from dp_engine.proof.worlds import World, describe
from vote.explorer import Exploration, explore
from vote.foresight import longest_wait


def explore_world(world: World, odd: Mapping[int, Cast] | None = None) -> Exploration:
    """All that can happen in a world. `odd`: ranks that are not played as usual."""
    casts = odd or {}
    ranks = [ExploredRank(world, rank, casts.get(rank, Cast())) for rank in range(world.ranks)]
    return explore(ranks, world.events, longest_wait(world.vote) if world.bounded else None, describe)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dp_engine.explore", description="Explore the standard worlds.")
    parser.add_argument("--world", action="append", metavar="NAME", help="only this one; may be given several times")
    parser.add_argument("--list", action="store_true", help="say what worlds there are and what they are there for")
    options = parser.parse_args(arguments)
    worlds = standard_worlds()
    if options.list:
        for world in worlds.values():
            print(f"{world.name:24} {world.ranks} ranks: {world.about}")
        return 0
    if unknown := set(options.world or ()) - set(worlds):
        print(f"no world named {', '.join(sorted(unknown))}; --list names them", file=sys.stderr)
        return 2
    return _explore([worlds[name] for name in options.world or worlds])


def _explore(worlds: list[World]) -> int:
    print(f"{'world':24} {'states':>8} {'transitions':>12} {'of a rank':>10} {'waited':>10} {'seconds':>8}")
    states, failed = 0, 0
    for world in worlds:
        started = time.perf_counter()
        found = explore_world(world)
        seconds = time.perf_counter() - started
        waited = f"{found.waited} of {longest_wait(world.vote)}" if world.engine.policy == "phased" else "-"
        sizes = f"{found.states:8} {found.transitions:12} {found.rank_states:10}"
        print(f"{world.name:24} {sizes} {waited:>10} {seconds:8.1f}", flush=True)
        states += found.states
        if found.counterexample is not None:
            failed += 1
            print(found.counterexample)
    verdict = f"{failed} with a counterexample" if failed else "no counterexample"
    print(f"{len(worlds)} worlds, {states} states, {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
