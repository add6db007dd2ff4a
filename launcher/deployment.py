"""A running deployment: guardian, Ray, router and gangs, started and stopped as one."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dp_engine.link import SILENT_VOTES
from launcher.config import ConfigError, DeploymentConfig, RayConfig
from launcher.guardian import Guardian
from launcher.loading import LoadingBar
from launcher.ray_session import RaySession
from launcher.router import Router
from launcher.terminal import Terminal

if TYPE_CHECKING:
    from launcher.supervisor import Supervisor

SHUTDOWN_S = 3.0  # for ranks to leave their loop together before they are killed
LEAVE_RAY_S = 2.5  # for each step of leaving Ray


class Deployment:
    """Async context manager: inside it the ranks are starting, `ready` waits for them, and `router` takes requests.

    Everything it started is gone after it.
    """

    def __init__(self, config: DeploymentConfig, model_dir: Path, voice: Terminal) -> None:
        self._config = config
        self._model_dir = model_dir
        self._voice = voice
        self._stack = contextlib.AsyncExitStack()
        self._supervisors: list[Supervisor] = []
        self._lives: list[asyncio.Task[str]] = []
        bar = LoadingBar(voice, config.dp * config.replicas)
        self._stack.callback(bar.close)
        self.router = Router(
            config.dp,
            replicas=config.replicas,
            max_inflight=config.router.max_inflight,
            max_deaths=config.supervision.max_request_deaths,
            silence_s=SILENT_VOTES * config.vote.control_timeout_s,
            on_log=voice.rank_log,
            on_loading=bar.on_loading,
        )

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def ready(self) -> None:
        """Wait until every rank has said Hello. Raises DeploymentFailed with the reason a gang gives for its end. From
        then on gangs that end are started again."""
        await _all(supervisor.ready() for supervisor in self._supervisors)
        self._lives = [asyncio.create_task(supervisor.run()) for supervisor in self._supervisors]

    async def died(self) -> str:
        """Wait until all gangs have been given up; returns why. Open requests have failed by then."""
        reasons = await asyncio.gather(*(asyncio.shield(life) for life in self._lives))
        return "; ".join(dict.fromkeys(reasons))

    async def _start(self) -> None:
        cfg = self._config
        guardian = Guardian() if cfg.ray.address is None else None
        if guardian is not None:
            self._stack.push_async_callback(asyncio.to_thread, guardian.release)
        self._voice.stage("joining Ray" if cfg.ray.address else "starting Ray")
        session = await self._enter_ray(cfg.ray)
        _reclaim_signals()
        if guardian is not None:
            guardian.watch_session(session.session_dir())
        from launcher.supervisor import Home, Supervisor  # imports ray, which reads its environment then

        gangs = f"{cfg.replicas} gangs of " if cfg.replicas > 1 else ""
        self._voice.stage(f"placing {gangs}{cfg.dp} rank{'s' if cfg.dp > 1 else ''}")
        home = Home(session.node_id(), session.node_ip())
        self._stack.push_async_callback(self.router.close)
        for number in range(cfg.replicas):
            supervisor = Supervisor(number, cfg, self._model_dir, self.router, home, self._voice)
            self._stack.push_async_callback(_bounded, supervisor.kill)
            self._supervisors.append(supervisor)
        await _all(supervisor.start() for supervisor in self._supervisors)
        self._voice.stage("loading the model")
        self._stack.push_async_callback(self._leave)

    async def _enter_ray(self, config: RayConfig) -> RaySession:
        """A start that is interrupted is finished first, so that there is something to shut down."""
        session = RaySession(config)
        entering = asyncio.create_task(asyncio.to_thread(session.__enter__))

        async def leave() -> None:
            await asyncio.wait({entering})
            if entering.exception() is None:
                await asyncio.to_thread(session.__exit__, None, None, None)

        self._stack.push_async_callback(_bounded, leave)
        return await asyncio.shield(entering)

    async def _leave(self) -> None:
        """Ask the ranks to leave together; those that do not are killed by what follows on the stack."""
        for life in self._lives:
            life.cancel()
        if self._lives:
            await asyncio.wait(self._lives, timeout=SHUTDOWN_S)
        await self.router.shutdown(SHUTDOWN_S)


async def _all(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Side by side; the first error ends them all and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _bounded(step: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A step of the end. Ray may be dead already and then blocks for a minute; the guardian does the rest."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(step(), LEAVE_RAY_S)


def _reclaim_signals() -> None:
    """Ray puts a crash handler, which prints a stack, before Python's own for SIGTERM: put ours back."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)


def configure_logging() -> None:
    """Libraries speak from WARNING on; phalanx's own lines go through the terminal."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for noisy in ("ray", "httpx", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def resolve_model(config: DeploymentConfig) -> Path:
    """The checkpoint directory; that of a GGUF is made first. Raises ConfigError if it cannot be one."""
    if config.model == "demo":
        from launcher.demo_model import DemoModelError, ensure_demo_model

        try:
            return ensure_demo_model()
        except DemoModelError as error:
            raise ConfigError(str(error)) from None
    path = Path(config.model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        from dp_engine.gguf_file import GgufError  # slow imports, needed for a GGUF only
        from launcher.building import progress_bars
        from launcher.gguf_model import model_directory

        try:
            with progress_bars() as progress:
                return model_directory(path, progress)
        except GgufError as error:
            raise ConfigError(str(error)) from None
    if not path.is_dir():
        raise ConfigError(f"model directory {path} does not exist")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model directory {path} has no config.json")
    return path.resolve()
