"""Start-up check: settings that must be equal on all ranks are compared before the first step."""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from vote.errors import RanksMissing, SettingsMismatch

if TYPE_CHECKING:
    from torch.distributed import Store

Settings = Mapping[str, str]


def digest(settings: Settings) -> int:
    """A non-negative int32 that stands for the settings in every ballot."""
    text = msgspec.json.encode(sorted(settings.items()))
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1


def differences(by_rank: Mapping[int, Settings]) -> dict[str, dict[int, str]]:
    """Settings that are not equal on all ranks, with each rank's value."""
    names = {name for settings in by_rank.values() for name in settings}
    table = {name: {rank: s.get(name, "(absent)") for rank, s in by_rank.items()} for name in names}
    return {name: values for name, values in table.items() if len(set(values.values())) > 1}


def compare_settings(store: "Store", rank: int, size: int, settings: Settings, timeout_s: float) -> None:
    """Publish this rank's settings, read everybody's, and raise if they differ or somebody stays away.

    Raises SettingsMismatch (naming ranks, settings, values) or RanksMissing.
    """
    store.set(f"settings/{rank}", msgspec.json.encode(dict(settings)).decode())
    wait_for_keys(store, {other: f"settings/{other}" for other in range(size)}, timeout_s, "the start-up check")
    found = {other: msgspec.json.decode(store.get(f"settings/{other}"), type=dict[str, str]) for other in range(size)}
    if table := differences(found):
        raise SettingsMismatch(table)


def wait_for_keys(
    store: "Store",
    keys: Mapping[int, str],
    timeout_s: float,
    what: str,
    sign: Callable[[], object] = lambda: None,
) -> None:
    """Wait until every rank's key is there; RanksMissing names those that are not.

    The time counts anew whenever `sign` says something else than before: those who are late are still at work.
    """
    deadline, seen = time.monotonic() + timeout_s, sign()
    while True:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if not missing:
            return
        if (now := sign()) != seen:
            deadline, seen = time.monotonic() + timeout_s, now
        if time.monotonic() > deadline:
            raise RanksMissing(missing, timeout_s, what)
        time.sleep(0.02)
