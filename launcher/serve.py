"""`phalanx serve` and `phalanx generate`: a deployment from the first line to the last process."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from launcher.config import ConfigError, DeploymentConfig
from launcher.deployment import Deployment, resolve_model
from launcher.errors import DeploymentFailed
from launcher.front.app import make_app
from launcher.front.auth import take_api_key
from launcher.http import LOOPBACKS, bind_http, check_tls, serve_http, server_url
from launcher.offline import BadInput, generate_file, read_requests
from launcher.ray_session import node_address
from launcher.router import GangDown
from launcher.service import Service
from launcher.terminal import Terminal
from launcher.text import Text


async def serve(config: DeploymentConfig, terminal: Terminal) -> int:
    """Serve until told to stop or drained (0), or until all gangs have been given up (DeploymentFailed)."""
    key, tls = take_api_key(config.server.api_key_file), check_tls(config.server)
    with bind_http(config.server.host or node_address(config.ray), config.server.port) as listener:
        if key is None and (host := listener.getsockname()[0]) not in LOOPBACKS:
            terminal.stage(f"no API key is set: whoever reaches {host} may use the server and stop its ranks")
        async with _service(config, terminal) as (deployment, service):
            most = int(config.server.max_body_mib * (1 << 20))
            app = make_app(service, most, api_key=key, chaos=config.chaos.enabled)
            stop = asyncio.Event()
            front = asyncio.create_task(serve_http(app, listener, stop, tls))
            try:
                await deployment.ready()
                _announce(config, service, listener, terminal)
                await _until_drained(deployment)
            finally:
                deployment.router.fail("the server is shutting down")  # ends open streams, so that the front can end
                stop.set()
                await front
    return 0


async def _until_drained(deployment: Deployment) -> None:
    """Wait until the operator has drained the server. Raises DeploymentFailed if the gangs end before."""
    died = asyncio.create_task(deployment.died())
    drained = asyncio.create_task(deployment.router.wait_drained())
    try:
        await asyncio.wait({died, drained}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise DeploymentFailed(died.result())
    finally:
        died.cancel()
        drained.cancel()


async def generate(config: DeploymentConfig, source: Path, target: Path, terminal: Terminal) -> int:
    """Answer a file of requests and leave. Exit code 1 if a rank refused some of them. Raises ConfigError."""
    try:
        requests = read_requests(source)
        output = target.open("w")
    except (OSError, BadInput) as error:
        raise ConfigError(str(error)) from None
    with output:
        async with _service(config, terminal) as (deployment, service):
            await deployment.ready()
            work = asyncio.create_task(generate_file(service, requests, output, console=terminal.console))
            death = asyncio.create_task(deployment.died())
            try:
                return 1 if await work else 0
            except GangDown:
                raise DeploymentFailed(await death) from None
            except BadInput as error:
                raise ConfigError(str(error)) from None
            finally:
                work.cancel()
                death.cancel()


@contextlib.asynccontextmanager
async def _service(config: DeploymentConfig, terminal: Terminal) -> AsyncIterator[tuple[Deployment, Service]]:
    """Deployment and tokenizer start side by side."""
    model_dir = await asyncio.to_thread(resolve_model, config)
    loading = asyncio.create_task(asyncio.to_thread(Text.load, model_dir))
    try:
        async with Deployment(config, model_dir, terminal) as deployment:
            name = config.server.model_name or model_dir.name
            yield deployment, Service(await loading, deployment.router, name, config.engine.block_size)
    finally:
        loading.cancel()


def _announce(config: DeploymentConfig, service: Service, listener: socket.socket, terminal: Terminal) -> None:
    url, name = server_url(listener, config), service.model_name
    ranks = f"{config.dp} rank{'s' if config.dp > 1 else ''}"
    ranks = f"{config.replicas} x {ranks}" if config.replicas > 1 else ranks
    body: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": 60}
    print(f"ready  {url}  model {name}  {ranks}  {terminal.seconds():.1f} s")
    if service.text.has_chat_template:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    else:
        path, body["prompt"] = "completions", "Once upon a time"
    print(f"try    curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{json.dumps(body)}'", flush=True)


def run_until_signal(main: Callable[[], Coroutine[Any, Any, int]], terminal: Terminal) -> int:
    """Run `main` on a fresh loop; SIGINT and SIGTERM cancel it, and it ends with 0 after cleaning up.

    A second signal changes nothing: the end takes seconds and cannot be made faster without leaving processes behind.
    """
    loop = uvloop.new_event_loop()
    task = loop.create_task(main())

    def stop() -> None:
        terminal.stage("stopping")
        task.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        return loop.run_until_complete(task)
    except asyncio.CancelledError:
        return 0


def leave(code: int) -> None:
    """End the process without waiting for threads that may still be blocked inside Ray."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
