"""A running deployment: guardian, Ray, router and gang, started and stopped as one."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dp_engine.link import SILENT_VOTES
from launcher.config import ConfigError, DeploymentConfig, RayConfig
from launcher.errors import DeploymentFailed
from launcher.guardian import Guardian
from launcher.keys import LaunchKeys
from launcher.ray_session import RaySession
from launcher.router import GangDown, OnLog, Router

if TYPE_CHECKING:
    from launcher.gang import Gang

SHUTDOWN_S = 3.0  # for ranks to leave their loop together before they are killed
LEAVE_RAY_S = 2.5  # for each step of leaving Ray
VERDICT_S = 10.0  # after the router has failed, for the gang to say why
EPOCH = 1  # of the first gang


class Deployment:
    """Async context manager: inside it the ranks are starting, `ready` waits for them, and `router` takes requests.

    Everything it started is gone after it. `say` gets one short line per stage; `on_log` the ranks'
    log lines, `on_diagnosis` the report of a gang that left the lockstep.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        model_dir: Path,
        *,
        say: Callable[[str], None],
        on_log: OnLog,
        on_diagnosis: Callable[[str], None],
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._say = say
        self._on_log = on_log
        self._on_diagnosis = on_diagnosis
        self._stack = contextlib.AsyncExitStack()
        self._ended: asyncio.Task[str] | None = None
        self.router: Router

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

    async def died(self) -> str:
        """Wait until the gang ends unasked; returns who ended and why. Open requests have failed by then."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def _start(self) -> None:
        cfg = self._config
        guardian = Guardian() if cfg.ray.address is None else None
        if guardian is not None:
            self._stack.push_async_callback(asyncio.to_thread, guardian.release)
        self._say("joining Ray" if cfg.ray.address else "starting Ray")
        session = await self._enter_ray(cfg.ray)
        _reclaim_signals()
        if guardian is not None:
            guardian.watch_session(session.session_dir())
        from launcher.gang import Gang  # imports ray, which reads its environment then

        self._say(f"placing {cfg.dp} rank{'s' if cfg.dp > 1 else ''}")
        gang = Gang(cfg, self._model_dir, EPOCH)
        self._stack.push_async_callback(_bounded, gang.kill)
        await gang.place()
        keys = LaunchKeys.generate()
        host = cfg.router.host or ("127.0.0.1" if gang.on_node(session.node_id()) else session.node_ip())
        silence_s = SILENT_VOTES * cfg.vote.control_timeout_s
        self.router = Router(
            cfg.dp, keys, EPOCH, host, cfg.router.max_inflight, self._on_log, self._on_diagnosis, silence_s
        )
        await self.router.start()
        self._stack.push_async_callback(self.router.close)
        self._say("loading the model")
        await gang.launch(self.router.endpoint, keys.for_rank())
        self._ended = asyncio.create_task(self._watch(gang))
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

    async def ready(self) -> None:
        """Wait until every rank has said Hello. Raises DeploymentFailed with the reason the gang gives for its end."""
        assert self._ended is not None
        ready = asyncio.create_task(self.router.wait_ready(self._config.ray.start_timeout_s))
        try:
            await asyncio.wait({ready, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is None:
                return
            if ready.done() and isinstance(ready.exception(), TimeoutError):
                raise DeploymentFailed(str(ready.exception()))
            raise DeploymentFailed(await self._ended)
        finally:
            ready.cancel()
            with contextlib.suppress(asyncio.CancelledError, TimeoutError, GangDown):
                await ready

    async def _watch(self, gang: "Gang") -> str:
        """The gang knows best why it ended; the router may know first, or alone (a rank that is merely cut off)."""
        ended = asyncio.create_task(gang.wait_end())
        failed = asyncio.create_task(self.router.failed())
        try:
            await asyncio.wait({ended, failed}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=VERDICT_S)
            reason = ended.result() if ended.done() else failed.result()
        finally:
            ended.cancel()
            failed.cancel()
        self.router.fail(reason)
        return reason

    async def _leave(self) -> None:
        """Ask the ranks to leave together; those that do not are killed by what follows on the stack."""
        assert self._ended is not None
        if not self._ended.done():
            await self.router.shutdown(SHUTDOWN_S)
        self._ended.cancel()


async def _bounded(step: Callable[[], Awaitable[None]]) -> None:
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
    """The checkpoint directory. Raises ConfigError if it cannot be one."""
    if config.model == "demo":
        from launcher.demo_model import DemoModelError, ensure_demo_model

        try:
            return ensure_demo_model()
        except DemoModelError as error:
            raise ConfigError(str(error)) from None
    path = Path(config.model).expanduser()
    if not path.is_dir():
        raise ConfigError(f"model directory {path} does not exist")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model directory {path} has no config.json")
    return path.resolve()
