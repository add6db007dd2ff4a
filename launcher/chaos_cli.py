"""The commands of `phalanx chaos`."""

from collections.abc import Callable
from typing import Annotated

import typer

from launcher.config import ConfigError

app = typer.Typer(
    help="Let something go wrong in a running server that was started with --set chaos.enabled=true.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

URL = typer.Option(help="Base URL of the server.")
DEFAULT_URL = "http://127.0.0.1:8000"
RANK = typer.Option(help="Number of a rank, `random` or `all`.")
AFTER = typer.Option(help="Steps that still go well.", min=0)
STEPS = typer.Option(help="For how many steps.", min=1)


@app.command()
def kill(
    rank: Annotated[str, RANK] = "random", after: Annotated[int, AFTER] = 0, url: Annotated[str, URL] = DEFAULT_URL
) -> None:
    """Kill a rank's process (SIGKILL)."""
    _inject(url, "kill", rank, after_steps=after)


@app.command()
def stop(
    rank: Annotated[str, RANK] = "random", after: Annotated[int, AFTER] = 0, url: Annotated[str, URL] = DEFAULT_URL
) -> None:
    """Stop a rank's process (SIGSTOP)."""
    _inject(url, "stop", rank, after_steps=after)


@app.command("raise")
def raise_(
    rank: Annotated[str, RANK] = "random", after: Annotated[int, AFTER] = 0, url: Annotated[str, URL] = DEFAULT_URL
) -> None:
    """Raise an exception in a step of a rank."""
    _inject(url, "raise", rank, after_steps=after)


@app.command()
def hang(
    rank: Annotated[str, RANK] = "random", after: Annotated[int, AFTER] = 0, url: Annotated[str, URL] = DEFAULT_URL
) -> None:
    """Let a step of a rank never end."""
    _inject(url, "hang", rank, after_steps=after)


@app.command()
def slow(
    rank: Annotated[str, RANK] = "random",
    seconds: Annotated[float, typer.Option(help="What each step takes longer.", min=0)] = 0.1,
    steps: Annotated[int, STEPS] = 100,
    url: Annotated[str, URL] = DEFAULT_URL,
) -> None:
    """Make the steps of a rank slow."""
    _inject(url, "slow", rank, seconds=seconds, steps=steps)


@app.command()
def drop(
    rank: Annotated[str, RANK] = "random",
    messages: Annotated[int, typer.Option(help="How many.", min=1)] = 1,
    direction: Annotated[str, typer.Option(help="`to_router` or `to_rank`.")] = "to_router",
    url: Annotated[str, URL] = DEFAULT_URL,
) -> None:
    """Lose messages between a rank and the router."""
    _inject(url, "drop", rank, messages=messages, direction=direction)


@app.command()
def full(
    rank: Annotated[str, RANK] = "random", steps: Annotated[int, STEPS] = 100, url: Annotated[str, URL] = DEFAULT_URL
) -> None:
    """Withhold all KV blocks of a rank that are free now."""
    _inject(url, "full", rank, steps=steps)


@app.command()
def poison(
    tokens: Annotated[str, typer.Option(help="Token ids in a row, with commas: 17,4,17.")],
    rank: Annotated[str, RANK] = "all",
    how: Annotated[str, typer.Option(help="`raise` or `kill`.")] = "raise",
    url: Annotated[str, URL] = DEFAULT_URL,
) -> None:
    """Let requests whose prompt contains certain tokens end the rank that computes them, from now on."""
    try:
        ids = [int(token) for token in tokens.split(",")]
    except ValueError:
        raise ConfigError(f"--tokens wants token ids with commas between them, got {tokens!r}") from None
    _inject(url, "poison", rank, tokens=ids, how=how)


@app.command()
def drill(
    every: Annotated[float, typer.Option(help="Seconds between recovery and the next fault.", min=0)] = 5.0,
    count: Annotated[int, typer.Option(help="Number of faults.", min=1)] = 10,
    kinds: Annotated[str, typer.Option(help="Kinds of faults, with commas.")] = "kill,stop,raise",
    seed: Annotated[int, typer.Option(help="Same seed, same faults.")] = 0,
    url: Annotated[str, URL] = DEFAULT_URL,
) -> None:
    """Let random faults happen at random ranks, one after the other, and time how long until the server is ready again.

    Exit code 1 if it never is.
    """
    from launcher.chaos import run_drill

    _ask(lambda: run_drill(url, kinds.split(","), count=count, every_s=every, seed=seed))


def _inject(url: str, kind: str, rank: str, **parameters: object) -> None:
    from launcher.chaos import run_fault

    _ask(lambda: run_fault(url, kind, rank, parameters))


def _ask(question: Callable[[], int]) -> None:
    from launcher.client import ServerError

    try:
        raise typer.Exit(question())
    except ServerError as error:
        raise ConfigError(str(error)) from None
