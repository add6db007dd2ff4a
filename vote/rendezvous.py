"""The gang's meeting point: a key-value store that rank 0 binds first and publishes from inside its own process."""

import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Bind a store to `host` on a free port and return it with the port.

    The socket is bound here and handed over, since TCPStore on its own listens on all interfaces.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to rank 0's store."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
