"""One replica, from its first life on: starts its gang, finds out when and why it ended, starts it again."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_engine.messages import Diagnosis
from launcher.config import ConfigError, DeploymentConfig
from launcher.crashes import CrashReports, last_sight
from launcher.death import Death
from launcher.ends import GangEnd
from launcher.errors import DeploymentFailed
from launcher.gang import Gang
from launcher.gang_link import GangLink
from launcher.keys import LaunchKeys
from launcher.placement import Placement
from launcher.router import GangDown, Router
from launcher.terminal import Terminal
from launcher.watch import Watch
from vote.report import Sightings

VERDICT_S = 8.0  # after the first sign of an end, for the ranks to say why
FRUITFUL_S = 60.0  # a life that serves for so long counts as a good one, requests or not
SPARE_AFTER_S = 5.0  # a life has served, before the next one's processes are started
SPARE_PATIENCE_S = 5.0  # for a spare that is being placed when it is needed
REMAINS_S = 10.0  # for the last life's processes to be gone


@dataclass(frozen=True)
class Life:
    """One gang, and the router's way to it."""

    gang: Gang
    link: GangLink
    born: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Home:
    """Where the launcher is: the node's id in the cluster, and its address there."""

    node_id: str
    node_ip: str


def backoff(failures: int, first_s: float, most_s: float) -> float:
    """Seconds to wait after so many bad lives in a row."""
    return 0.0 if failures == 0 else min(first_s * 2.0 ** min(failures - 1, 30), most_s)


def judge(link: GangLink, end: GangEnd | None, seen: Death | None) -> Death:
    """Why a life ended. The ranks' own diagnosis counts for most, then what Ray says of their processes, then what was
    seen from outside, then what the router noticed first."""
    blamed = end.blamed if end is not None else []
    lost = bool(blamed) and all(rank.kind == "lost" for rank in blamed)
    if (diagnosis := link.diagnosis) is not None and diagnosis.culprits:
        reason = end.reason if end is not None and blamed else diagnosis.title
        return Death(reason, frozenset(diagnosis.culprits), diagnosis.innocent or lost)
    if end is not None and blamed:
        return Death(end.reason, frozenset(rank.rank for rank in blamed), lost)
    if seen is not None:
        return seen
    if link.lost_rank is not None:
        return Death(link.down or "", frozenset({link.lost_rank}), innocent=True)
    return Death(end.reason if end is not None else link.down or "it ended")


class Supervisor:
    """`start` the first life, wait for it with `ready`, then `run` until the replica is given up. Owns the placement
    and the present life; `kill` ends both."""

    def __init__(
        self,
        replica: int,
        config: DeploymentConfig,
        model_dir: Path,
        router: Router,
        home: Home,
        voice: Terminal,
    ) -> None:
        self.replica = replica
        self._config = config
        self._model_dir = model_dir
        self._router = router
        self._home = home
        self._voice = voice
        self._placement = Placement(config, replica)
        self._crashes = CrashReports(Path(config.supervision.crash_dir).expanduser(), config.supervision.crash_reports)
        self._epoch = 0
        self._life: Life | None = None
        self._spare: Gang | None = None  # placed for the next life; it has the next epoch
        self._placing = False  # the spare, just now
        self._chores: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Place and launch the first gang. Raises ConfigError or DeploymentFailed."""
        self._life = await self._begin()

    async def ready(self) -> None:
        """Wait until every rank of the first gang has said Hello. Raises DeploymentFailed, or TimeoutError."""
        assert self._life is not None
        await self._await_hellos(self._life)

    async def run(self) -> str:
        """Watch over one life after the other. Returns why there are no more."""
        settings, failures = self._config.supervision, 0
        while True:
            life = self._life
            assert life is not None
            spare = self._do(self._keep_spare())
            death = await self._end_of(life)
            carried = self._router.bury(self.replica, life.link.epoch, death)
            failures = 0 if self._fruitful(life) else failures + 1
            over = not settings.restart or failures >= settings.max_failures
            if life.link.diagnosis is not None:
                self._voice.report(life.link.diagnosis.text)
            if not over:
                go_on = f"; {carried} request{'s' if carried != 1 else ''} will go on" if carried else ""
                self._voice.error(f"{self._name} (epoch {self._epoch}) has ended: {death.reason}{go_on}")
            await self._clear(life, death, carried)
            await self._settle(spare)
            if over:
                return await self._give_up(death, failures)
            while (failure := await self._try_again(failures)) is not None:
                failures += 1
                if failures >= settings.max_failures:
                    return await self._give_up(Death(failure), failures)

    async def kill(self) -> None:
        """End what is running and give the resources back."""
        for chore in self._chores:
            chore.cancel()
        if self._chores:
            await asyncio.wait(self._chores, timeout=REMAINS_S)
        gangs = [self._spare, self._life.gang if self._life is not None else None]
        await asyncio.gather(*(gang.kill() for gang in gangs if gang is not None))
        if self._life is not None:
            await self._life.link.close()
        await self._placement.release()

    @property
    def _name(self) -> str:
        return "the gang" if self._config.replicas == 1 else f"gang {self.replica}"

    # ---- beginnings

    async def _begin(self) -> Life:
        """The next life, up to the moment that its ranks load."""
        cfg = self._config
        await self._placement.reserve()
        self._epoch += 1
        gang, placed = await self._next_gang()
        keys = LaunchKeys.generate()
        link: GangLink | None = None
        try:
            if not placed:
                await gang.place()
            here = gang.on_node(self._home.node_id)
            link = self._router.open(self.replica, keys, self._epoch)
            await link.start(cfg.router.host or ("127.0.0.1" if here else self._home.node_ip))
            await gang.launch(link.endpoint, keys.for_rank())
        except BaseException:
            await gang.kill()
            if link is not None:
                await link.close()
            raise
        return Life(gang, link)

    async def _next_gang(self) -> tuple[Gang, bool]:
        """For this epoch; True: it has been placed already, and its processes wait."""
        spare, self._spare = self._spare, None
        if spare is not None:
            if await spare.waits():
                return spare, True
            await spare.kill()
        return self._gang(self._epoch), False

    def _gang(self, epoch: int) -> Gang:
        def on_log(rank: int, level: int, text: str) -> None:
            self._voice.rank_log(self.replica, rank, level, text)

        return Gang(self._config, self._model_dir, epoch, self._placement, on_log)

    async def _keep_spare(self) -> None:
        """Start the next life's processes while this one serves: importing what ranks need takes half of a restart.

        Not at once, since that takes the machine's time too, and not where each process takes a GPU.
        """
        if not self._config.supervision.spare or self._config.ranks.gpus:
            return
        await asyncio.sleep(SPARE_AFTER_S)
        gang = self._gang(self._epoch + 1)
        self._placing = True
        try:
            await gang.place()
        except BaseException as error:
            await gang.kill()
            if not isinstance(error, DeploymentFailed):
                raise
        else:
            self._spare = gang
        finally:
            self._placing = False

    async def _try_again(self, failures: int) -> str | None:
        """The next life, up to its readiness. Returns what went wrong; then nothing of it is left."""
        settings = self._config.supervision
        await asyncio.sleep(backoff(failures, settings.backoff_s, settings.backoff_max_s))
        started = time.monotonic()
        try:
            await self._again()
        except (ConfigError, DeploymentFailed) as error:
            self._router.restarting(self.replica, str(error))
            self._voice.error(f"{self._name} did not come up again: {error}")
            return str(error)
        self._voice.stage(f"{self._name} serves again, {time.monotonic() - started:.1f} s later (epoch {self._epoch})")
        return None

    async def _again(self) -> None:
        life = await self._begin()
        try:
            await self._await_hellos(life)
        except BaseException:
            await life.gang.kill()
            await life.link.close()
            raise
        self._life = life
        self._router.replicas[self.replica].restarts += 1

    async def _await_hellos(self, life: Life) -> None:
        ended = asyncio.create_task(life.gang.wait_end())
        ready = asyncio.create_task(life.link.wait_ready(self._config.ray.start_timeout_s))
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and (error := ready.exception()) is None:
                return
            if ready.done() and isinstance(error, TimeoutError):
                raise DeploymentFailed(str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), VERDICT_S)
            raise DeploymentFailed(judge(life.link, ended.result() if ended.done() else None, None).reason)
        finally:
            ended.cancel()
            ready.cancel()
            with contextlib.suppress(asyncio.CancelledError, TimeoutError, GangDown):
                await ready

    # ---- ends

    async def _clear(self, life: Life, death: Death, carried: int) -> None:
        """Keep what is to be seen of a life that has ended, and end what is left of it."""
        seen = await asyncio.to_thread(last_sight, life.link)  # before Ray kills the ranks, and their observers too
        self._do(self._keep(life.link, death, carried, seen))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(life.gang.kill(), REMAINS_S)

    async def _settle(self, spare: "asyncio.Task[None]") -> None:
        """The spare is there, or about to be, or will not be: what hangs with a lost host is not waited for."""
        if self._placing:
            await asyncio.wait({spare}, timeout=SPARE_PATIENCE_S)
        spare.cancel()
        await asyncio.wait({spare}, timeout=REMAINS_S)

    def _fruitful(self, life: Life) -> bool:
        """Was it a good one?"""
        return life.link.fruitful or time.monotonic() - life.born > FRUITFUL_S

    async def _end_of(self, life: Life) -> Death:
        """The first sign of an end closes the link, so that requests wait or go elsewhere; then why it came is found
        out."""
        link = life.link
        ended = asyncio.create_task(life.gang.wait_end())
        down = asyncio.create_task(link.wait_down())
        watched = asyncio.create_task(Watch(link, self._config.vote.control_timeout_s).wait())
        told = asyncio.create_task(link.wait_diagnosis())
        tasks: set[asyncio.Task[Any]] = {ended, down, watched, told}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            seen = watched.result() if watched.done() else None
            link.fail(seen.reason if seen is not None else _first_reason(ended, told))  # unless it was down first
            if seen is None:
                await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED, timeout=VERDICT_S)
            return judge(link, ended.result() if ended.done() else None, seen)
        finally:
            for task in tasks:
                task.cancel()

    async def _keep(self, link: GangLink, death: Death, carried: int, seen: Sightings) -> None:
        """Write down what there is to keep; meanwhile the next gang starts."""
        try:
            folder = await asyncio.to_thread(self._crashes.write, link, death, carried, seen)
            if folder is not None:
                self._voice.stage(f"crash report in {folder}")
        finally:
            await link.close()

    def _do(self, chore: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task

    async def _give_up(self, death: Death, failures: int) -> str:
        reason = death.reason
        if self._config.supervision.restart:
            reason = f"{self._name} was given up after {failures} bad lives in a row: {reason}"
        self._router.give_up(self.replica, reason)
        if self._router.links:
            self._voice.error(f"{reason}; the others go on without it")
        if self._chores:
            await asyncio.wait(self._chores, timeout=REMAINS_S)
        return reason


def _first_reason(ended: "asyncio.Task[GangEnd]", told: "asyncio.Task[Diagnosis]") -> str:
    if ended.done():
        return ended.result().reason
    return told.result().title if told.done() else ""
