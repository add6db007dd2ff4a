"""The command line: `phalanx`, or `python -m launcher` from a checkout."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher import chaos_cli, job_cli
from launcher.config import ConfigError, DeploymentConfig, load_config
from launcher.environment import EnvironmentCheckError, check_environment
from launcher.ray_session import join_own_cluster
from launcher.terminal import Terminal

app = typer.Typer(
    name="phalanx",
    help="Serve mixture-of-experts language models with one complete engine per data-parallel rank. The ranks vote "
    "before every step and exchange tokens with their experts' owners in every layer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(chaos_cli.app, name="chaos")

CONFIG = typer.Argument(help="YAML file with settings; see configs/ and docs/configuration.md.", show_default=False)
MODEL = typer.Option(help="Checkpoint directory in Hugging Face's layout, a .gguf file, or `demo`.", show_default=False)
DP = typer.Option(help="Number of data-parallel ranks.", show_default=False)
SET = typer.Option("--set", help="Any setting: --set engine.block_size=32. Repeatable.", metavar="K=V")
RAY_ADDRESS = typer.Option(help="Join this Ray cluster, or `auto`, not start a local one.", show_default=False)
URL = typer.Option(help="Base URL of the server.")
DEFAULT_URL = "http://127.0.0.1:8000"
VERBOSE = typer.Option("--verbose", "-v", help="Show the ranks' log lines.")


@app.command()
def serve(
    config: Annotated[Path | None, CONFIG] = None,
    model: Annotated[str | None, MODEL] = None,
    dp: Annotated[int | None, DP] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.", show_default=False)] = None,
    ray_address: Annotated[str | None, RAY_ADDRESS] = None,
    settings: Annotated[list[str] | None, SET] = None,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Serve a model behind an OpenAI-compatible HTTP API until Ctrl-C."""
    from launcher.serve import serve as run

    deployment = load_config(
        config, settings, model=model, dp=dp, server__host=host, server__port=port, ray__address=ray_address
    )
    deployment = join_own_cluster(deployment)
    terminal = Terminal(verbose)
    _run(lambda: run(deployment, terminal), terminal)


@app.command()
def generate(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="JSONL file: one request a line.")],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSONL file to write, in the order of INPUT.")],
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.", show_default=False)] = None,
    model: Annotated[str | None, MODEL] = None,
    dp: Annotated[int | None, DP] = None,
    ray_address: Annotated[str | None, RAY_ADDRESS] = None,
    settings: Annotated[list[str] | None, SET] = None,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Answer a file of requests without a server.

    A line is a JSON object with "prompt", "messages" or "prompt_token_ids", and sampling parameters as in the HTTP API.
    """
    from launcher.serve import generate as run

    deployment = join_own_cluster(load_config(config, settings, model=model, dp=dp, ray__address=ray_address))
    terminal = Terminal(verbose)
    _run(lambda: run(deployment, source, target, terminal), terminal)


@app.command()
def chat(
    url: Annotated[str, URL] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model name; default: the server's.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the model's.", show_default=False)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", show_default=False)] = None,
) -> None:
    """Talk to a running server in the terminal."""
    from launcher.chat import run_chat

    raise typer.Exit(run_chat(url, model=model, system=system, temperature=temperature, max_tokens=max_tokens))


@app.command()
def doctor(url: Annotated[str, URL] = DEFAULT_URL) -> None:
    """Compare the ranks of a running or hung server: where each is, since when, and who left the lockstep.

    Exit code 0 if nobody has left it, 1 if somebody has, 2 if the server cannot be asked.
    """
    from launcher.diagnose import run_doctor

    _ask(lambda: run_doctor(url))


@app.command()
def trace(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("trace.json"),
    url: Annotated[str, URL] = DEFAULT_URL,
    steps: Annotated[int | None, typer.Option(min=1, help="Only the last N steps.", show_default=False)] = None,
) -> None:
    """Write the recent steps of a running server as a Chrome trace, for ui.perfetto.dev.

    Ranks are processes in it; steps, ballots, dispatch, experts and combine are slices.
    """
    from launcher.diagnose import run_trace

    _ask(lambda: run_trace(url, output, steps))


@app.command("demo-model")
def demo_model(
    directory: Annotated[
        Path | None, typer.Argument(help="Where to; default: the user's cache.", show_default=False)
    ] = None,
) -> None:
    """Build the demo model: SmolLM2-135M-Instruct upcycled to a Mixtral-format mixture of 8 experts (1.4 GB)."""
    from launcher.demo_model import DemoModelError, run

    try:
        print(run(directory))
    except DemoModelError as error:
        raise ConfigError(str(error)) from None


@app.command("config")
def show_config(
    config: Annotated[Path | None, CONFIG] = None, settings: Annotated[list[str] | None, SET] = None
) -> None:
    """Print the complete configuration that `serve` would use, as YAML."""
    import yaml

    resolved: DeploymentConfig = load_config(config, settings)
    print(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), end="")


for job_command in job_cli.COMMANDS:
    app.command()(job_command)


def _ask(question: Callable[[], int]) -> None:
    from launcher.client import ServerError

    try:
        raise typer.Exit(question())
    except ServerError as error:
        raise ConfigError(str(error)) from None


def _run(work: Callable[[], Coroutine[Any, Any, int]], terminal: Terminal) -> None:
    from launcher.deployment import configure_logging
    from launcher.errors import DeploymentFailed
    from launcher.serve import leave, run_until_signal

    configure_logging()
    try:
        check_environment()
        code = run_until_signal(work, terminal)
    except (ConfigError, EnvironmentCheckError) as error:
        terminal.error(str(error))
        code = 2
    except DeploymentFailed as error:
        terminal.error(str(error))
        code = 1
    leave(code)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong input (one line says what)."""
    try:
        app()
    except ConfigError as error:
        Terminal(False).error(str(error))
        raise SystemExit(2) from None
