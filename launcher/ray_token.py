"""Ray's token authentication: Ray neither finds out whether a cluster wants a token nor forgives one too many."""

import os
from collections.abc import Callable
from pathlib import Path

from launcher.config import ConfigError

MODE = "RAY_AUTH_MODE"
WHERE = "~/.ray/auth_token, RAY_AUTH_TOKEN or the file that RAY_AUTH_TOKEN_PATH names"


def use_token(where: str, wanted: Callable[[], bool]) -> None:
    """Use this user's token if the cluster (`where`, in words) wants one; must come before ray is imported.

    A RAY_AUTH_MODE of the user's own is respected. Raises ConfigError when there is no token.
    """
    if MODE in os.environ or not wanted():
        return
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not given and not (Path.home() / ".ray" / "auth_token").exists():
        raise ConfigError(f"{where} wants an authentication token: put the cluster's token into {WHERE}")
    os.environ[MODE] = "token"
