"""Compiled C libraries: from a wheel, from an earlier run, or made by the C compiler.

A package keeps plain C sources in ``csrc/``. The first use compiles them in seconds and stores the
library in the package's ``__pycache__`` or in a temporary folder of this user, under a name with
the digest of sources, flags and platform. Folders that other users can write to are not read, nor
those whose file system runs no programs.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmpq.errors import LlmpqError

if sys.platform != "win32":
    import fcntl

COMPILERS = ("cc", "gcc", "clang")
COMPILE_LIMIT_S = 300.0
_NAP_S = 0.05
_log = logging.getLogger(__name__)


class NotCompiledError(LlmpqError):
    """There is no compiled library, and none can be compiled or stored."""


def library_path(
    package: Path,
    name: str,
    flags: Sequence[str],
    prebuilt: str | None = None,
    limit_s: float = math.inf,
) -> Path:
    """Return the compiled library of ``package``, compiling it unless it is there already.

    Args:
        package: folder that holds ``csrc/``.
        name: what the library's file name starts with.
        flags: the compiler's, part of the digest.
        prebuilt: pattern of the file that a wheel installs in ``package``; it takes precedence.
            ``None`` compiles for a wheel.
        limit_s: seconds that this may take; compiling takes ``COMPILE_LIMIT_S`` at most.

    Raises:
        NotCompiledError: there is none, and it cannot be compiled or stored.
    """
    if prebuilt and (shipped := sorted(package.glob(prebuilt))):
        return shipped[0]
    if sys.platform == "win32":
        raise NotCompiledError("found Windows, where the C code is not compiled")
    sources = sorted((package / "csrc").glob("*.[ch]"))
    file_name = f"{name}-{_digest(sources, flags)}.so"
    folders = list(_folders(package))
    for folder in folders:
        if (folder / file_name).is_file():
            return folder / file_name
    units = [str(source) for source in sources if source.suffix == ".c"]
    for folder in folders:
        target = folder / file_name
        try:
            # Ranks start together: one compiles, the others wait for it.
            with _alone(folder, limit_s) as left_s:
                if not target.is_file():
                    _log.warning("compiling C code (%s), once: it takes seconds", name)
                    _compile(flags, units, target, min(left_s, COMPILE_LIMIT_S))
                return target
        except OSError:
            continue
    raise NotCompiledError(f"found no writable folder for the compiled code, such as {package}")


def _digest(sources: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.sha256(repr((tuple(flags), sysconfig.get_platform())).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _folders(package: Path) -> Iterator[Path]:
    """Yield the folders a library may be loaded from; other users cannot write to them."""
    own = os.getuid()
    folders = [package / "__pycache__"]
    with contextlib.suppress(FileNotFoundError):  # a container may have no writable folder at all
        folders.append(Path(tempfile.gettempdir()) / f"llmpq-{own}")
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            status, mount = folder.stat(), os.statvfs(folder)
        except OSError:
            continue
        if mount.f_flag & os.ST_NOEXEC:
            continue
        if status.st_uid in (0, own) and not status.st_mode & 0o022:
            yield folder


@contextlib.contextmanager
def _alone(folder: Path, limit_s: float) -> Iterator[float]:
    """Wait at most ``limit_s`` until no other process compiles there; yield the seconds left."""
    end_s = time.monotonic() + limit_s
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            left_s = end_s - time.monotonic()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if left_s <= 0:
                    raise NotCompiledError("found no time to compile") from None
                time.sleep(_NAP_S)
        yield left_s
    finally:
        os.close(descriptor)


def _compile(flags: Sequence[str], units: Sequence[str], target: Path, limit_s: float) -> None:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise NotCompiledError(f"found no C compiler ({', '.join(COMPILERS)}) and no compiled code")
    end_s = time.monotonic() + limit_s
    # Renamed when complete: a process that starts meanwhile sees a whole library or none.
    with tempfile.TemporaryDirectory(prefix="made-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        objects = [str(Path(folder) / f"{Path(unit).stem}.o") for unit in units]
        pairs = zip(units, objects, strict=True)
        commands = [[compiler, *flags, "-c", unit, "-o", name] for unit, name in pairs]
        _run(commands, Path(folder), limit_s)
        left_s = end_s - time.monotonic()
        _run([[compiler, *flags, *objects, "-o", str(made), "-lm"]], Path(folder), left_s)
        made.replace(target)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run(commands: Sequence[Sequence[str]], folder: Path, limit_s: float) -> None:
    """Run compilers, as many at a time as there are cores.

    Each runs in ``folder`` as a process group of its own, which is killed at the limit.

    Raises:
        NotCompiledError: one failed, or all took too long.
    """
    if limit_s <= 0:
        raise NotCompiledError("found no time to compile")
    end_s, cores = time.monotonic() + limit_s, _num_cores()
    waiting, running = list(commands), list[subprocess.Popen[bytes]]()
    with (folder / "errors").open("w+b") as errors:
        try:
            while waiting or running:
                while waiting and len(running) < cores:
                    running.append(
                        subprocess.Popen(
                            waiting.pop(0),
                            stdout=subprocess.DEVNULL,
                            stderr=errors,
                            env=os.environ | {"TMPDIR": str(folder)},
                            process_group=0,
                        )
                    )
                if any(job.poll() for job in running):
                    errors.seek(0)
                    said = errors.read().decode(errors="replace").strip()
                    raise NotCompiledError(f"{commands[0][0]} failed: {said[-400:]}")
                running = [job for job in running if job.returncode is None]
                if running and time.monotonic() >= end_s:
                    raise NotCompiledError(f"{commands[0][0]} took over {limit_s:.3g} s")
                time.sleep(_NAP_S if running else 0)
        finally:
            for job in running:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
