"""Memory that the ranks of one host share: an anonymous file of the kernel, which is gone with the last rank.

It never has a name in a file system, so nothing can be left behind, however the ranks end, and the small /dev/shm of a
container is no limit. Rank 0 makes it; the others open it through /proc, which the kernel lets only the same user do.
Pages are taken when they are first written.
"""

import mmap
import os
import secrets

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllToAllOptions

from ep.dispatch import CollectiveFailed

BOARD_BYTES = 1 << 16  # at the front of the file; a multiple of every page size in use


class NotShared(Exception):
    """Not all ranks can open one memory. The message says which cannot, and is the same on all of them."""


class Region:
    """Owns a rank's descriptor of the shared file, `board`, its first BOARD_BYTES, and a mapping of the rest."""

    def __init__(self, fd: int, rank: int, size: int):
        """rank of size: whose it is. Takes over `fd`."""
        self.rank = rank
        self.size = size
        self.board = mmap.mmap(fd, BOARD_BYTES)
        self._fd = fd
        self._rest: mmap.mmap | None = None

    def rest(self, num_bytes: int) -> mmap.mmap:
        """What lies behind the board, at least `num_bytes`. All ranks ask for the same sizes in the same order, so
        whoever comes first makes the file longer, and nobody makes it shorter."""
        if self._rest is None or len(self._rest) < num_bytes:
            if os.fstat(self._fd).st_size < BOARD_BYTES + num_bytes:
                os.ftruncate(self._fd, BOARD_BYTES + num_bytes)
            self._rest = mmap.mmap(self._fd, num_bytes, offset=BOARD_BYTES)
        return self._rest


def open_region(group: ProcessGroup) -> Region:
    """A collective over `group` (gloo). Raises NotShared on all ranks when some cannot open it: they are on other
    hosts, in other containers, or another user's."""
    rank, size = group.rank(), group.size()
    name = f"phalanx-experts-{secrets.token_hex(8)}"
    own = _create(name) if rank == 0 else None
    told = _tell_all(group, (os.getpid(), -1 if own is None else own, int(name[-16:], 16) - (1 << 63)))
    pid, number, nonce = told[0]
    fd = own if rank == 0 else _open(pid, number, f"phalanx-experts-{nonce + (1 << 63):016x}")
    missing = [other for other, (has_it,) in enumerate(_tell_all(group, (int(fd is not None),))) if not has_it]
    if fd is not None and not missing:
        return Region(fd, rank, size)
    if fd is not None:
        os.close(fd)
    if 0 in missing:
        raise NotShared("the host of rank 0 has no memfd_create")
    raise NotShared(f"ranks {missing} share no memory with rank 0; are they on its host?")


def _create(name: str) -> int | None:
    try:
        fd = os.memfd_create(name)
        os.ftruncate(fd, BOARD_BYTES)
    except (AttributeError, OSError):
        return None
    return fd


def _open(pid: int, number: int, name: str) -> int | None:
    """The descriptor `number` of process `pid` as one of our own, if it is what it should be: on another host the same
    numbers may mean anything."""
    path = f"/proc/{pid}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{name}"):
            return None
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def _tell_all(group: ProcessGroup, numbers: tuple[int, ...]) -> list[list[int]]:
    """Everybody's numbers, by rank."""
    mine = torch.tensor(numbers * group.size(), dtype=torch.int64)
    everybodys = torch.empty_like(mine)
    try:
        group.alltoall_base(everybodys, mine, [], [], AllToAllOptions()).wait()
    except RuntimeError as error:
        raise CollectiveFailed(f"rank {group.rank()} cannot ask the others for shared memory: {error}") from error
    numbers_by_rank: list[list[int]] = everybodys.view(group.size(), -1).tolist()
    return numbers_by_rank
