"""Sleeping until a number in shared memory changes: Linux's futex, between processes.

Unlike a rank that naps and looks again, one that sleeps here is woken by the very rank it waits for, which may hand it
its own core.
"""

import ctypes
import platform
import time

_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
NAP_S = 0.0002  # where the system has no futex

_number = _SYSCALLS.get(platform.machine()) if platform.system() == "Linux" else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_call = ctypes.CDLL(None).syscall


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep until somebody calls `wake` for this address, if the 32 bits there are still `value`; at most `timeout_s`.
    May return early: look again."""
    if _number is None:
        time.sleep(min(NAP_S, timeout_s))
        return
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _call(ctypes.c_long(_number), ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake all that sleep at this address."""
    if _number is not None:
        _call(ctypes.c_long(_number), ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, 0)
