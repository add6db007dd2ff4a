"""The commands for jobs on a cluster: submit, status, logs, stop, drain."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from launcher.client import ServerError
from launcher.config import ConfigError, load_config
from launcher.terminal import Terminal

ADDRESS = typer.Option(
    help="The cluster's job server, http://HEAD:8265; default: RAY_API_SERVER_ADDRESS, else this machine's.",
    show_default=False,
)
JOB = typer.Argument(metavar="ID", help="The job's submission id.", show_default=False)


def submit(
    config: Annotated[Path | None, typer.Argument(help="YAML file with settings.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint directory on the nodes.", show_default=False)] = None,
    dp: Annotated[int | None, typer.Option(help="Number of data-parallel ranks.", show_default=False)] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Any setting. Repeatable.", metavar="K=V")] = None,
    address: Annotated[str | None, ADDRESS] = None,
    job_id: Annotated[str | None, typer.Option("--id", help="Submission id; default: a new one.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="Variable that travels with the job. Repeatable.", metavar="NAME[=VALUE]")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the job's id and leave.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log to the job's end.")] = False,
) -> None:
    """Serve on a Ray cluster: this checkout as a job. Waits until the server is ready and prints its URL.

    Exit code 0 once it is ready, or with --follow once the job has succeeded; 1 if it failed or was stopped.
    """
    from launcher.submit import Wish, submit

    deployment = load_config(config, settings, model=model, dp=dp)
    arguments = [part for setting in settings or [] for part in ("--set", setting)]
    arguments += ["--model", model] if model is not None else []
    arguments += ["--dp", str(dp)] if dp is not None else []
    wish = Wish(config, tuple(arguments), address, job_id, tuple(env or []), not no_wait, follow)
    raise typer.Exit(submit(wish, deployment, Terminal(False)))


def status(
    what: Annotated[
        str | None, typer.Argument(metavar="[ID|URL]", help="A job, or a server's URL; default: all jobs.")
    ] = None,
    address: Annotated[str | None, ADDRESS] = None,
) -> None:
    """Show the jobs of a cluster, one of them, or what a server's replicas do."""
    from launcher.job_control import show_job, show_jobs, show_server

    if what is None:
        _ask(lambda: show_jobs(address))
    elif _is_url(what):
        _ask(lambda: show_server(what))
    else:
        _ask(lambda: show_job(what, address))


def logs(
    job_id: Annotated[str, JOB],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job's end.")] = False,
    address: Annotated[str | None, ADDRESS] = None,
) -> None:
    """Print a job's log. With --follow the exit code is the job's: 0 succeeded, 1 failed or stopped."""
    from launcher.job_control import show_log

    _ask(lambda: show_log(job_id, follow, address))


def stop(job_id: Annotated[str, JOB], address: Annotated[str | None, ADDRESS] = None) -> None:
    """End a job in order and wait until nothing of it is left. Requests in flight fail; see `drain`."""
    from launcher.job_control import stop_job

    _ask(lambda: stop_job(job_id, address))


def drain(
    what: Annotated[str, typer.Argument(metavar="URL|ID", help="A server's URL, or its job.", show_default=False)],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the requests in flight.")] = 600.0,
    address: Annotated[str | None, ADDRESS] = None,
) -> None:
    """Let a server finish what it has begun, take nothing new, and end. Exit code 1 if it has not ended in time."""
    from launcher.job_control import drain_job, drain_server

    _ask(lambda: drain_server(what, timeout) if _is_url(what) else drain_job(what, timeout, address))


COMMANDS = (submit, status, logs, stop, drain)


def _is_url(what: str) -> bool:
    return what.startswith(("http://", "https://"))


def _ask(question: Callable[[], int]) -> None:
    from launcher.jobs import Unreachable

    try:
        raise typer.Exit(question())
    except (ServerError, Unreachable) as error:
        raise ConfigError(str(error)) from None
