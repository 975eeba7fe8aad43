"""Replaces itself with a server that cannot outlive its parent, optionally as another user.

Run as a script by an isolated interpreter: `python -I -S child.py PARENT_PID SIGNAL UID COMMAND…`. UID -1 keeps the
user. It uses only the standard library, so that it starts in milliseconds. On Linux, the kernel sends SIGNAL to the
server when the parent dies, however it dies. A server that changes its user keeps CAP_DAC_OVERRIDE, because its data
directory may be below a home directory of mode 700.
"""

import ctypes
import os
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 8, 47, 2
CAP_DAC_OVERRIDE = 1
CAPABILITY_VERSION_3 = 0x20080522


def prctl(option: int, first: int, second: int = 0) -> None:
    """The system call; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, first, second, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def become(user_id: int) -> None:
    """Change to the user and keep no capability of root except CAP_DAC_OVERRIDE, across exec."""
    prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)
    libc = ctypes.CDLL(None, use_errno=True)
    bit = 1 << CAP_DAC_OVERRIDE
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    if libc.capset(header, struct.pack("6I", bit, bit, bit, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset refused CAP_DAC_OVERRIDE")
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE)


def main(parent: int, death_signal: int, user_id: int, command: list[str]) -> None:
    """Never returns: becomes the command or exits."""
    if user_id >= 0:
        become(user_id)
    if sys.platform == "linux":
        # Set after the change of user, which would clear it.
        prctl(PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:
        sys.exit("the parent died before the server started")
    os.execv(command[0], command)  # noqa: S606  # the command is a fixed program with an argument list


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
