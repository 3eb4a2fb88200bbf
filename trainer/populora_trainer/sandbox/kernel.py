"""The kernel's isolation, layer by layer, through ctypes: what a worker gives up for good before it runs a program.

| layer       | what it takes away                                                     | required                    |
|-------------|------------------------------------------------------------------------|-----------------------------|
| rlimits     | memory, processor time, file size, open files, processes, core dumps   | yes                         |
| unprivileged| root's user id, where the worker was started by root                   | yes                         |
| nnp         | gaining privileges by exec (precondition of the next two)              | yes                         |
| landlock    | every file system access; TCP; signals to processes outside            | yes, second guard for files |
| seccomp     | every system call but those of pure computation                        | yes                         |
| namespaces  | the host's network and IPC                                             | no: seccomp denies sockets  |
| clock       | every clock, which a program reads without a system call               | no: for one verdict only    |
| variation   | agreement by chance, of what an honest program can't depend on         | no: for one verdict only    |

seccomp alone denies files, network, processes and signals; landlock guards files a second time, so that no single
mistake opens them. A kernel without landlock (before 5.13, gVisor) can be allowed by name. Namespaces need a privilege
or user namespaces, which restricted pods lack, so they are used where they can be had. A program that gets hold of a
clock or of its process id gets an error or the same number in every run, so that neither tells runs apart. How runs
vary: variation.py.

Sources: seccomp(2), landlock(7), prctl(2), linux/filter.h, asm/unistd_64.h, asm-generic/unistd.h.
"""

import ctypes
import mmap
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable, Sequence

REQUIRED_LAYERS = ("rlimits", "unprivileged", "nnp", "landlock", "seccomp")
OPTIONAL_LAYERS = ("namespaces", "clock", "variation")

_NOBODY = 65534
_EPERM = 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 4, 22, 38, 36
_SECCOMP_MODE_FILTER = 2
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446  # the same on every architecture
_SIGKILL = 9

# (AUDIT_ARCH, numbers of the system calls that follow by name)
_ARCHITECTURES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0, "write": 1, "close": 3, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13,
            "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "sched_yield": 24, "mremap": 25, "madvise": 28,
            "getpid": 39, "clone": 56, "fork": 57, "exit": 60, "wait4": 61, "kill": 62, "gettimeofday": 96,
            "getppid": 110, "rt_sigtimedwait": 128, "prctl": 157, "setrlimit": 160, "gettid": 186, "time": 201,
            "futex": 202, "restart_syscall": 219, "clock_gettime": 228, "exit_group": 231, "waitid": 247,
            "set_robust_list": 273, "prlimit64": 302, "rseq": 334,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "close": 57, "read": 63, "write": 64, "pread64": 67, "exit": 93, "exit_group": 94, "waitid": 95,
            "futex": 98, "set_robust_list": 99, "clock_gettime": 113, "sched_yield": 124, "restart_syscall": 128,
            "kill": 129, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigtimedwait": 137, "rt_sigreturn": 139,
            "setrlimit": 164, "prctl": 167, "gettimeofday": 169, "getpid": 172, "getppid": 173, "gettid": 178,
            "brk": 214, "munmap": 215, "mremap": 216, "clone": 220, "mmap": 222, "mprotect": 226, "madvise": 233,
            "wait4": 260, "prlimit64": 261, "rseq": 293,
        },
    ),
}  # fmt: skip

# System calls of a program: memory, its own result, its own end.
_COMPUTATION = (
    "read", "write", "close", "mmap", "mprotect", "munmap", "mremap", "madvise", "brk", "futex", "rt_sigprocmask",
    "rt_sigreturn", "sched_yield", "restart_syscall", "exit", "exit_group", "rseq", "set_robust_list",
)  # fmt: skip
# What the zygote needs on top of that to start, limit, await and kill a program; a second filter takes it from each
# program, and so takes what differs from run to run.
_SUPERVISION = (
    "getpid", "gettid", "gettimeofday", "time", "clock_gettime",
    "clone", "fork", "pread64", "wait4", "waitid", "kill", "prctl", "prlimit64", "setrlimit", "getppid", "rt_sigaction",
    "rt_sigtimedwait",
)  # fmt: skip

_CLONE_MORE_THAN_FORK = 0x7E82A100  # any CLONE_NEW*, UNTRACED, PARENT, PTRACE, VM
_PROT_EXEC = 4


class LayerError(OSError):
    """A layer cannot be had; the text says why."""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> int:
    if result < 0:
        raise LayerError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


class Kernel:
    """System calls that Python does not offer."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise LayerError(f"needs Linux, this is {sys.platform}")
        libc = _libc()
        self._prctl, self._syscall = libc.prctl, libc.syscall
        self._prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
        self._unshare = libc.unshare
        self._mmap = libc.mmap
        self._mmap.restype = ctypes.c_size_t
        self._mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._keep: list[ctypes.Array[ctypes.c_char]] = []

    def die_with_parent(self) -> None:
        """Have the kernel kill this process when the thread that started it ends."""
        _call("PR_SET_PDEATHSIG", self._prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0))

    def adopt_orphans(self) -> None:
        """Become the parent of every orphaned descendant."""
        _call("PR_SET_CHILD_SUBREAPER", self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))

    def no_new_privileges(self) -> None:
        """Give up gaining privileges, and being traced or read by processes of the same user."""
        _call("PR_SET_NO_NEW_PRIVS", self._prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _call("PR_SET_DUMPABLE", self._prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))

    def namespaces(self) -> None:
        """Enter an empty network and IPC namespace, inside a user namespace unless started by root."""
        new_ipc, new_net, new_uts, new_user = 0x08000000, 0x40000000, 0x04000000, 0x10000000
        flags = new_ipc | new_net | new_uts | (0 if os.geteuid() == 0 else new_user)
        _call("unshare", self._unshare(flags))

    def landlock(self) -> None:
        """Deny every file system access, TCP, abstract sockets and signals to processes outside."""
        abi = _call("landlock_create_ruleset", self._syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
        rights = 13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16
        fields = [(1 << rights) - 1, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0]
        attributes = struct.pack("=3Q", *fields)[: 8 if abi < 4 else 16 if abi < 6 else 24]
        ruleset = _call(
            "landlock_create_ruleset",
            self._syscall(_LANDLOCK_CREATE, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), 0),
        )
        _call("landlock_restrict_self", self._syscall(_LANDLOCK_RESTRICT, ruleset, 0))
        os.close(ruleset)

    def hide_clock(self) -> None:
        """Put zeros in place of the memory in which the kernel shows this process the time.

        They say that there is no clock to be read in it, so that every look at one becomes a system call, which the
        filter of a program denies. The coarse clocks, which are read as they stand there, say 0.
        """
        with open("/proc/self/maps") as maps:
            lines = [line.split() for line in maps if line.rstrip().endswith("[vvar]")]
        if not lines:
            raise LayerError("no [vvar] in /proc/self/maps")
        start, end = [int(address, 16) for address in lines[0][0].split("-")]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        if self._mmap(start, end - start, mmap.PROT_READ, flags, -1, 0) != start:
            raise LayerError(f"mmap over [vvar]: {os.strerror(ctypes.get_errno())}")

    def install(self, program: "ctypes.Array[ctypes.c_char]") -> None:
        """Install a seccomp filter made by `supervisor_filter` or `program_filter`; needs `no_new_privileges`."""
        _call("PR_SET_SECCOMP", self._prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0))

    def supervisor_filter(self) -> "ctypes.Array[ctypes.c_char]":
        """Return the zygote's filter: computation, and starting and killing its children."""
        return self._fprog(_supervisor_instructions(*_architecture()))

    def program_filter(self) -> "ctypes.Array[ctypes.c_char]":
        """Return the filter of a program, to be put on top of the zygote's: no supervision any more."""
        return self._fprog(_program_instructions(*_architecture()))

    def _fprog(self, instructions: Sequence[tuple[int, int, int, int]]) -> "ctypes.Array[ctypes.c_char]":
        code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
        body = ctypes.create_string_buffer(code, len(code))
        head = struct.pack("@HP", len(instructions), ctypes.addressof(body))
        program = ctypes.create_string_buffer(head, len(head))
        self._keep += [body, program]
        return program


class Confinement:
    """What a forked child takes from itself before it does anything else.

    All arguments stand ready and nothing is converted or imported: each page of the zygote that a child writes to has
    to be copied first, and these copies are most of a run's cost.
    """

    def __init__(self, *, limits: bool, program: "ctypes.Array[ctypes.c_char] | None") -> None:
        """Prepare the calls; the child makes them with `apply`.

        Args:
            limits: whether to set the limits of a program.
            program: its filter, from `Kernel.program_filter`; None for no filter.
        """
        libc = ctypes.CDLL(None)
        # What from_param returns is handed over as it is; a number or an instance of a ctypes type is converted.
        number, word = ctypes.c_int.from_param, ctypes.c_ulong.from_param
        self._prctl, self._prlimit, self._getppid = libc.prctl, libc.prlimit, libc.getppid
        self._death = (number(_PR_SET_PDEATHSIG), word(_SIGKILL), word(0), word(0), word(0))
        self._limits = limits
        self._seconds, self._none = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 2)()
        self._time = (number(0), number(resource.RLIMIT_CPU), ctypes.byref(self._seconds), word(0))
        self._processes = (number(0), number(resource.RLIMIT_NPROC), ctypes.byref(self._none), word(0))
        self._program = program
        self._filter = None
        if program is not None:
            address = word(ctypes.addressof(program))
            self._filter = (number(_PR_SET_SECCOMP), word(_SECCOMP_MODE_FILTER), address, word(0), word(0))

    def apply(self, cpu_seconds: int) -> None:
        """Be killed when the zygote ends, and give up processor time, further processes and supervision.

        Raises:
            LayerError: one of the calls fails; nothing may be run then.
        """
        failed = self._prctl(*self._death)
        if self._getppid() == 1:  # the zygote ended before the line above
            os._exit(1)
        if self._limits:
            # A hard limit that is not above the soft one kills by SIGKILL, as the out-of-memory killer does.
            self._seconds[0], self._seconds[1] = cpu_seconds, cpu_seconds + 1
            failed |= self._prlimit(*self._time) | self._prlimit(*self._processes)
        if self._filter:
            failed |= self._prctl(*self._filter)
        if failed:
            raise LayerError("a child could not be confined")


def _architecture() -> tuple[int, dict[str, int]]:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise LayerError(f"no filter for {machine}, only for {' and '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[machine]


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _DENY, _KILL = (_RETURN, 0, 0, 0x7FFF0000), (_RETURN, 0, 0, 0x00050000 | _EPERM), (_RETURN, 0, 0, 0x80000000)


def _argument(index: int) -> tuple[int, int, int, int]:
    """Load the low half of an argument; all arguments tested here are 32 bits wide, on little-endian machines."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _prologue(audit_arch: int) -> list[tuple[int, int, int, int]]:
    return [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, audit_arch),
        _KILL,
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32 numbers name other calls
        _DENY,
    ]


def _supervisor_instructions(audit_arch: int, numbers: dict[str, int]) -> list[tuple[int, int, int, int]]:
    conditions: dict[str, list[tuple[int, int, int, int]]] = {
        "mmap": [_argument(2), (_ANY_BIT, 0, 1, _PROT_EXEC), _DENY, _ALLOW],
        "mprotect": [_argument(2), (_ANY_BIT, 0, 1, _PROT_EXEC), _DENY, _ALLOW],
        "clone": [_argument(0), (_ANY_BIT, 0, 1, _CLONE_MORE_THAN_FORK), _DENY, _ALLOW],
        "kill": [_argument(1), (_EQUAL, 1, 0, _SIGKILL), _DENY, _ALLOW],
        "prlimit64": [_argument(0), (_EQUAL, 1, 0, 0), _DENY, _ALLOW],
        "prctl": [
            _argument(0),
            (_EQUAL, 2, 0, _PR_SET_PDEATHSIG),
            (_EQUAL, 1, 0, _PR_SET_SECCOMP),
            _DENY,
            _ALLOW,
        ],
    }
    instructions = _prologue(audit_arch)
    for name in (*_COMPUTATION, *_SUPERVISION):
        if name in numbers:
            body = conditions.get(name, [_ALLOW])
            instructions += [(_EQUAL, 0, len(body), numbers[name]), *body]
    return [*instructions, _DENY]


def _program_instructions(audit_arch: int, numbers: dict[str, int]) -> list[tuple[int, int, int, int]]:
    denied = [numbers[name] for name in _SUPERVISION if name in numbers]
    checks = [(_EQUAL, len(denied) - index, 0, number) for index, number in enumerate(denied)]
    return [*_prologue(audit_arch), *checks, _ALLOW, _DENY]


def limit_worker(memory_mib: int) -> None:
    """Set the limits that zygote and programs share: address space, no files, no core dump."""
    try:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        used = 64 << 20
    for kind, value in (
        (resource.RLIMIT_AS, used + (memory_mib << 20)),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(kind, (value, value))


def limit_program(cpu_seconds: int) -> None:
    """Set the limits of a program alone: processor time, and no further process for an unprivileged user."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def drop_root() -> None:
    """Become the user nobody if this process is root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def attempt(layer: Callable[[], None]) -> str | None:
    """Apply a layer; return why it cannot be had, or None."""
    try:
        layer()
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return None
