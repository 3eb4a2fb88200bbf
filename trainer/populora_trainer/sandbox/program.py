"""Runs one program inside the isolated child and writes one record of what it did; or compiles many and runs none.

The record of a run is `nonce` + verdict (+ SEEN) + newline + text. The text of `valid` is one canonical output per
line, in the order of the inputs (canonical texts contain no newline); of anything else, one line of detail. Whoever
reads it must treat it as written by the program: the two share a process.

The record of a compilation is `nonce` and then, for one program after the other, a FRAME and its payload. The process
that writes it executes no program, but it has parsed hostile text, so it is confined and ended as any other, and its
code objects are loaded by isolated children only. What it cannot compile is compiled in its own run.
"""

import builtins
import codecs
import contextlib
import gc
import importlib
import itertools
import marshal
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import NoReturn

from populora_trainer.sandbox import literals, policy, variation
from populora_trainer.sandbox.verdicts import Verdict

FRAME = struct.Struct("=BI")  # kind, bytes of the payload
UNDECIDED, CODE, REFUSED = range(3)  # no payload; a marshalled code object; verdict, newline, detail
MAX_CODE_BYTES = 1 << 18
SEEN = "+"  # behind the verdict of a varied run whose program saw what varies

_DETAIL_CHARS = 200
# Those of the standard library except for mainframes, old Macintoshes and a few of single countries.
_ENCODINGS = (
    "ascii", "latin-1", "utf-7", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be",
    "unicode_escape", "raw_unicode_escape", "idna", "punycode", "rot13", "hex", "base64", "quopri", "uu", "zlib",
    "cp437", "cp850", "cp852", "cp855", "cp858", "cp866", "cp874", "mac_roman", "koi8-r", "koi8-u",
    *[f"cp125{number}" for number in range(9)],
    *[f"iso8859-{number}" for number in range(2, 17) if number != 12],
    "gb2312", "gbk", "gb18030", "hz", "big5", "big5hkscs", "cp950", "shift_jis", "shift_jis_2004", "cp932", "euc_jp",
    "iso2022_jp", "euc_kr", "cp949", "johab", "iso2022_kr",
)  # fmt: skip
# Taken before any program runs, so that a program which patches `os` or `builtins` patches them for itself only.
# Plain strings, because an enumeration's text is made by functions that look builtins up.
_write, _exit, _compile, _exec, _callable = os.write, os._exit, compile, exec, callable
_load, _bytes, _collect = marshal.loads, bytes, gc.collect
_str, _type, _type_name = str, type, literals._name
_VALID, _SYNTAX_ERROR, _MISSING_ENTRY, _FORBIDDEN_IMPORT = (
    Verdict.VALID.value,
    Verdict.SYNTAX_ERROR.value,
    Verdict.MISSING_ENTRY.value,
    Verdict.FORBIDDEN_IMPORT.value,
)
_VALID_VARIED = _VALID + SEEN
_RUNTIME_ERROR, _MEMORY, _OUTPUT_LIMIT, _UNSERIALISABLE, _CRASHED = (
    Verdict.RUNTIME_ERROR.value,
    Verdict.MEMORY.value,
    Verdict.OUTPUT_LIMIT.value,
    Verdict.UNSERIALISABLE.value,
    Verdict.CRASHED.value,
)


class ForbiddenImport(ImportError):  # noqa: N818
    """A program reached an import that its source did not show."""


class Job(tuple[bytes, bool, str | bytes, bytes, int, int, int]):
    """A run: nonce, whether to check policy, program or its code, packed inputs, longest output, number and key.

    Code comes from a `Compilation`, which has checked policy. The inputs are marshalled, see `literals.pack`. Number
    and key are those of `variation.begin`, or 0. A run with a number takes the inputs backwards, and the last of these
    twice: a program whose outputs depend on earlier calls gives others in another order or at another call. What counts
    calls modulo m > 1 and gave the same for its first input at call 1, n and n + 1 of n inputs would have m divide
    n - 1 and n.
    """

    @property
    def wire(self) -> bytes:
        """The job as the child reads it."""
        return marshal.dumps(tuple(self))


class Compilation(tuple[bytes, tuple[tuple[bool, str], ...]]):
    """Programs to compile: nonce, and for each whether to check policy, and its source."""

    @property
    def wire(self) -> bytes:
        """The job as the child reads it."""
        return marshal.dumps(tuple(self))


def _public_modules() -> dict[str, ModuleType]:
    """Copies of the allowed modules without the modules that they import themselves (`dataclasses.sys`, ...)."""
    copies: dict[str, ModuleType] = {}
    for name in sorted(policy.ALLOWED_MODULES):
        module = importlib.import_module(name)
        copies[name] = ModuleType(name, module.__doc__)
        public = getattr(module, "__all__", ()) or [key for key in vars(module) if not key.startswith("_")]
        vars(copies[name]).update(
            {key: getattr(module, key) for key in public if not isinstance(getattr(module, key), ModuleType)}
        )
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(copies[parent], child, copies[name])
    return copies


def _guarded_import(modules: Mapping[str, ModuleType]) -> Callable[..., ModuleType]:
    def guarded_import(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if level or name not in modules:
            raise ForbiddenImport(f"import of {name}")
        module = modules[name]
        for item in fromlist or ():
            # Python would fall back to the real submodule of that name.
            if item != "*" and not hasattr(module, item) and hasattr(sys.modules[name], item):
                raise ForbiddenImport(f"import of {item} from {name}")
        return module if fromlist else modules[name.partition(".")[0]]

    return guarded_import


class _Nowhere:
    """Standard output of a program: accepted and dropped."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Do nothing."""


def _refuse_unseeded() -> None:
    """Let whatever `random` gives without a seed end in an error; `statistics` draws samples from it."""
    random = sys.modules["random"]  # imported by `_public_modules`, without what it does in every fork

    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise RuntimeError("random numbers without a seed are different in every run")

    for name, value in list(vars(random).items()):
        if getattr(value, "__self__", None) is random._inst:
            setattr(random, name, refuse)
    seed = random.Random.seed

    def seeded(self: object, a: object = None, version: int = 2) -> None:
        if a is None:
            refuse()
        seed(self, a, version)

    random.Random.seed = seeded


def prepare(varied: bool = False) -> tuple[ModuleType, str | None]:
    """Return the module that a program runs in. Called once, before forking: every child has its own copy of it.

    Args:
        varied: whether runs after the first are made here; see variation.py.

    Returns:
        The module, and what does not vary although it should.
    """
    # random would draw a new seed in every fork, and threading look for threads. So nothing here imports them before.
    register, os.register_at_fork = os.register_at_fork, lambda **hooks: None
    modules = _public_modules()
    os.register_at_fork = register
    _refuse_unseeded()
    # Nobody can put anything into a queue that a program waits at, so its time is up at once.
    vars(sys.modules["queue"])["time"] = itertools.count(0.0, 1e18).__next__
    for encoding in _ENCODINGS:  # loaded when first used, and a program can load nothing
        codecs.lookup(encoding)
    unvaried = None
    if varied:
        try:
            variation.install()
            unvaried = variation.unvaried()
        except OSError as error:
            unvaried = str(error)
    absent = policy.FORBIDDEN_NAMES - {"__build_class__"}  # class statements need it; only naming it is forbidden
    namespace = {key: value for key, value in vars(builtins).items() if key not in absent}
    namespace["__import__"] = _guarded_import(modules)
    sys.stdout = sys.stderr = _Nowhere()
    module = ModuleType("program")
    module.__dict__["__builtins__"] = namespace
    sys.modules["program"] = module  # dataclasses looks its classes' module up
    return module, unvaried


def run(job: bytes, module: ModuleType, result_fd: int) -> NoReturn:
    """Do the job and end the process. Nothing of the program survives: neither exit handlers nor destructors run."""
    nonce, *task = marshal.loads(job)
    if len(task) == 1:
        _write_compiled(nonce, task[0], result_fd)
    check, program, inputs, max_chars, number, key = task
    try:
        verdict, text = _outcome(check, program, inputs, max_chars, module, number, key)
    except MemoryError:
        verdict, text = _MEMORY, ""
    except BaseException:
        verdict, text = _CRASHED, "the program broke its own interpreter"
    _write_all(result_fd, nonce + f"{verdict}\n{text}".encode(errors="backslashreplace"))
    _exit(0)


def _write_all(result_fd: int, record: bytes) -> None:
    while record:
        record = record[_write(result_fd, record) :]


def _write_compiled(nonce: bytes, programs: Sequence[tuple[bool, str]], result_fd: int) -> NoReturn:
    """Write each program's frame as soon as there is one, so that a program that ends this process costs no other."""
    _write_all(result_fd, nonce)
    for check, program in programs:
        kind, payload = UNDECIDED, b""
        # How deep a program may nest and how much memory it may take depends on what was compiled before it here.
        with contextlib.suppress(RecursionError, MemoryError):
            code = _code(check, program)
            if not isinstance(code, CodeType):
                kind, payload = REFUSED, "\n".join(code).encode(errors="backslashreplace")
            elif not _has_set(code):
                with contextlib.suppress(ValueError):  # nested too deeply for marshal
                    kind, payload = CODE, marshal.dumps(code)
        if len(payload) > MAX_CODE_BYTES:
            kind, payload = UNDECIDED, b""
        _write_all(result_fd, FRAME.pack(kind, len(payload)) + payload)
    _exit(0)


def _has_set(constant: object) -> bool:
    """Say whether a constant is or contains a frozenset, as of `x in {16, 8, 0}`.

    Marshalling sorts it, and the order in which a set is built can be seen in the order of its elements.
    """
    if isinstance(constant, CodeType):
        constant = constant.co_consts
    if isinstance(constant, tuple):
        return any(_has_set(one) for one in constant)
    return isinstance(constant, frozenset)


def _code(check: bool, program: str) -> CodeType | tuple[str, str]:
    """Return a program's code, or verdict and detail of what is refused before it runs.

    Raises:
        RecursionError, MemoryError: the program takes more than there is.
    """
    try:
        if check and (finding := policy.check(program)):
            return finding.verdict.value, finding.detail
        code: CodeType = _compile(program, "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return _SYNTAX_ERROR, _describe(error)
    return code if _names_entry(code) else (_MISSING_ENTRY, "the program defines no f")


def _names_entry(code: CodeType) -> bool:
    """Say whether a program may bind `f`: a function in it can, with `global f`."""
    return "f" in code.co_names or any(_names_entry(one) for one in code.co_consts if isinstance(one, CodeType))


def _outcome(
    check: bool, program: str | bytes, inputs: bytes, max_chars: int, module: ModuleType, number: int, key: int
) -> tuple[str, str]:
    try:
        code = _load(program) if isinstance(program, _bytes) else _code(check, program)
    except (RecursionError, MemoryError) as error:
        return _SYNTAX_ERROR, _describe(error)
    if not isinstance(code, CodeType):
        return code
    # What is called for the first time here costs pages that have to be copied, so little is.
    marked, arguments = _load(inputs)
    if marked:
        arguments = literals.unpack(arguments)
    if number:
        arguments = arguments[::-1] + _again(inputs)
        variation.begin(number, key)
    _collect()  # how much was made before the program started is not its doing
    outputs = []
    try:
        _exec(code, module.__dict__)
        entry = module.__dict__.get("f")
        if not _callable(entry):
            return _MISSING_ENTRY, "the program defines no callable f"
        for argument_list in arguments:
            value = entry(*argument_list)
            outputs.append(literals.canonical(value, max_chars))
            del value
    except MemoryError:
        return _MEMORY, ""
    except ForbiddenImport as error:
        return _FORBIDDEN_IMPORT, _describe(error)
    except literals.TooLarge as error:
        return _OUTPUT_LIMIT, _describe(error)
    except literals.NotLiteral as error:
        return _UNSERIALISABLE, _describe(error)
    except BaseException as error:
        return _RUNTIME_ERROR, _describe(error)
    return _VALID_VARIED if number and variation.seen() else _VALID, "\n".join(outputs)


def _again(inputs: bytes) -> list[tuple[object, ...]]:
    """Return the first argument list alone, made anew, since a call may have changed it."""
    marked, arguments = _load(inputs)
    return (literals.unpack(arguments) if marked else arguments)[:1]


def _describe(error: BaseException) -> str:
    # str() may run the program's own __str__; that can only fail, hang until the deadline, or lie about itself.
    try:
        message = _str(error)
    except BaseException:
        message = ""
    return f"{_type_name(_type(error))}: {message}"[:_DETAIL_CHARS].replace("\n", " ")
