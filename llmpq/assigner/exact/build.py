"""Where the compiled core comes from.

``csrc/`` is plain C11 without dependencies. A wheel may bring it compiled (``_core*.so`` next to
this module); otherwise the first use compiles it, about two seconds, and keeps it in
``__pycache__``, or in a folder of this user's among the temporary files, under a name that carries
the digest of its sources. Without a compiler the exact search is not covered.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmpq.assigner.exact.coverage import NotCoveredError

FLAGS = ("-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
"""Contraction is off so that a plan does not depend on whether a machine has fused operations."""

COMPILERS = ("cc", "gcc", "clang")
COMPILE_LIMIT_S = 60.0


def core_path(here: Path | None = None) -> Path:
    """Return the compiled core, compiling it unless it is there already.

    Args:
        here: the package's folder.

    Raises:
        NotCoveredError: there is none, and it cannot be compiled or kept.
    """
    here = here or Path(__file__).parent
    brought = sorted(here.glob("_core*.so"))
    if brought:
        return brought[0]
    sources = sorted((here / "csrc").glob("*.[ch]"))
    name = f"exact-{_digest(sources)}.so"
    folders = list(_folders(here))
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    for folder in folders:
        try:
            return _compile([str(item) for item in sources if item.suffix == ".c"], folder / name)
        except OSError:
            continue
    raise NotCoveredError(f"found no folder to keep the compiled core in, such as {here}")


def _digest(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr((FLAGS, sysconfig.get_platform())).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _folders(here: Path) -> Iterator[Path]:
    """Yield the folders a library may be loaded from: nobody else can write to them."""
    own = os.getuid()
    for folder in (here / "__pycache__", Path(tempfile.gettempdir()) / f"llmpq-{own}"):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.stat()
        except OSError:
            continue
        if status.st_uid in (0, own) and not status.st_mode & 0o022:
            yield folder


def _compile(sources: Sequence[str], target: Path) -> Path:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise NotCoveredError(f"found no C compiler ({', '.join(COMPILERS)}) and no compiled core")
    with tempfile.TemporaryDirectory(prefix="exact-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, *sources, "-o", str(made), "-lm"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False
        )
        if done.returncode:
            raise NotCoveredError(f"{compiler} failed on the core: {done.stderr.strip()[-400:]}")
        made.replace(target)
    return target
