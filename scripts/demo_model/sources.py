"""Where the text comes from: Debian packages of manuals, and the licence of each.

Only packages in the public domain or under a permissive licence are listed, because extracts of
their text are shipped beside the weights.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A Debian package and the files of it that hold prose.

    `licence` is the SPDX name of the licence the text is used under, read from the package's
    copyright file; `skip` is a regular expression on the path inside `folder`.
    """

    package: str
    licence: str
    folder: str
    kind: str = "html"
    skip: str = r"^$"


SPHINX_SKIP = r"(^|/)(_static|_sources|_downloads|genindex|py-modindex|search|contents|license)"


SOURCES = (
    Source(
        package="sqlite3-doc",
        licence="blessing (public domain)",
        folder="usr/share/doc/sqlite3",
        skip=r"releaselog|session/|syntax/|matrix|toc|keyword_index|doclist|mingw|"
        r"(changes|chronology|news|hp1|oldnews|cvstrac|sitemap|requirements)\.html",
    ),
    Source(
        package="postgresql-doc-15",
        licence="PostgreSQL",
        folder="usr/share/doc/postgresql-doc-15/html",
        skip=r"bookindex|release-|errcodes|features-sql|biblio|acronyms|contrib-spi-old",
    ),
    Source(
        package="python3.11-doc",
        licence="PSF-2.0",
        folder="usr/share/doc/python3.11/html",
        skip=SPHINX_SKIP + r"|whatsnew/changelog",
    ),
    Source(
        package="apache2-doc",
        licence="Apache-2.0",
        folder="usr/share/doc/apache2-doc/manual/en",
        skip=r"quickreference|mod/directives",
    ),
    Source(
        package="python-django-doc",
        licence="BSD-3-Clause",
        folder="usr/share/doc/python-django-doc/html",
        skip=SPHINX_SKIP + r"|internals/_images|glossary",
    ),
    Source(
        package="llvm-15-doc",
        licence="Apache-2.0 WITH LLVM-exception",
        folder="usr/share/doc/llvm-15-doc/html",
        skip=SPHINX_SKIP + r"|^AMDGPU/|doxygen",
    ),
    Source(
        package="clang-15-doc",
        licence="Apache-2.0 WITH LLVM-exception",
        folder="usr/share/doc/clang-15/html",
        skip=SPHINX_SKIP + r"|ClangCommandLineReference|DiagnosticsReference",
    ),
    Source(
        package="cmake-doc",
        licence="BSD-3-Clause",
        folder="usr/share/doc/cmake-data/html",
        skip=SPHINX_SKIP + r"|release/",
    ),
    Source(
        package="rust-doc",
        licence="MIT OR Apache-2.0",
        folder="usr/share/doc/rust-doc/html",
        skip=r"^(core|alloc|src|proc_macro|test|implementors|std/(arch|simd|os|intrinsics))/"
        r"|edition/|print\.html|/all\.html|^unstable-book/library-features/",
    ),
    Source(
        package="sphinx-doc",
        licence="BSD-2-Clause",
        folder="usr/share/doc/sphinx-doc/html",
        skip=SPHINX_SKIP + r"|changes",
    ),
    Source(
        package="twisted-doc",
        licence="MIT",
        folder="usr/share/doc/twisted-doc/html",
        skip=SPHINX_SKIP + r"|^api/",
    ),
    Source(
        package="perl-doc",
        licence="Artistic-1.0-Perl",
        folder="usr/share/perl",
        kind="pod",
        skip=r"perl\d*delta|perlhist|perlgpl|perlartistic|perltoc|perlapi\.|perlmodlib|perluniprops",
    ),
    Source(
        package="dict-jargon",
        licence="public domain",
        folder="usr/share/dictd",
        kind="dictd",
    ),
    Source(
        package="dict-devil",
        licence="public domain",
        folder="usr/share/dictd",
        kind="dictd",
    ),
)


def unpack(package: str, work: Path) -> dict[str, str]:
    """Download and unpack a Debian package under `work`; return its version and digest."""
    folder = work / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
    deb = sorted(folder.glob(f"{package}_*.deb"))[-1]
    target = work / "unpacked" / package
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", deb, target], check=True)
    shown = subprocess.run(["dpkg-deb", "-f", deb, "Version"], check=True, capture_output=True)
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    return {"version": shown.stdout.decode().strip(), "sha256": digest}
