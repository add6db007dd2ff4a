"""Secrets of one launch: who may talk to the router, and which launch a rank belongs to."""

import secrets
from dataclasses import dataclass, field
from typing import Self

import zmq

from dp_engine.link import RankKeys


@dataclass(frozen=True)
class LaunchKeys:
    """CURVE key pairs of one launch: the router's, and one shared by its ranks. Made anew for every launch."""

    launch_id: str
    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            launch_id=secrets.token_hex(16),
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
        )

    def for_rank(self) -> RankKeys:
        """The part that travels to the ranks: everything but the router's secret."""
        return RankKeys(self.launch_id, self.server_public, self.client_public, self.client_secret)
