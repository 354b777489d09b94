"""Run the steps of deploy/Dockerfile in bare root filesystems, and ask the model inside.

    scripts/image_check --folder DIR        # as root; about ten minutes and 8 GB under DIR

Docker needs an image to begin with, and a machine without a registry has none. ``debootstrap``
makes what ``FROM debian`` names; the instructions of the Dockerfile then run there under
``chroot``, in their order and with their environment. At the end the image's own command answers a
prompt, as the image's user and without a compiler. Package sources and certificates are those of
this host. ``hadolint`` reads the file first, where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
BASE = re.compile(r"debian:(\w+)-slim")
MOUNTS = ("/proc", "/sys", "/dev")
HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs", "/etc/apt")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
"""Those of this host, which a package's scripts would replace in a root filesystem."""
KEPT_CERTIFICATES = "/host-certificates.crt"
PROMPT = "The server listens on"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the instructions so far have set."""

    root: Path
    name: str
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    entry: tuple[str, ...] = ()


def main() -> int:
    """Lint, build and ask; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the root filesystems")
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of an ARG, such as TORCH=torch==2.13.0",
    )
    beside = Path(sys.executable).with_name("hadolint")
    parser.add_argument(
        "--hadolint", default=str(beside) if beside.exists() else "hadolint", help="the linter"
    )
    options = parser.parse_args()
    if os.geteuid():
        sys.exit("scripts/image_check: error: found another user, expected root: it uses chroot")
    if shutil.which("debootstrap") is None:
        sys.exit("scripts/image_check: error: found no debootstrap, expected Debian's package")
    if shutil.which(options.hadolint) is None:
        print("hadolint is not installed: the Dockerfile is not linted", file=sys.stderr)
    else:
        subprocess.run([options.hadolint, str(DOCKERFILE)], check=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    given = dict(word.split("=", 1) for word in options.build_arg)
    image = build(options.folder.resolve(), given)
    ask(image)
    print("the image answers")
    return 0


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile, each with its arguments on one line."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    for line in filter(str.strip, whole.splitlines()):
        name, _, words = line.partition(" ")
        yield name, words.strip()


def build(folder: Path, given: Mapping[str, str]) -> Stage:
    """Run all instructions with the given arguments; return the last stage."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for name, written in instructions(DOCKERFILE.read_text()):
        print(f"{name} {written}"[:150], flush=True)
        key = written.partition("=")[0]
        words = f"{key}={shlex.quote(given[key])}" if name == "ARG" and key in given else written
        if name == "FROM":
            image, _, alias = words.partition(" AS ")
            stage = Stage(root=fresh_root(folder, image, str(len(stages))), name=alias)
            stages[alias or str(len(stages))] = stage
            continue
        if stage is None:
            raise SystemExit(f"{DOCKERFILE}: found {name}, expected FROM first")
        stage = run_instruction(stage, name, words, stages)
        stages[stage.name or str(len(stages) - 1)] = stage
    assert stage is not None
    return stage


def run_instruction(stage: Stage, name: str, words: str, stages: dict[str, Stage]) -> Stage:
    """Run one instruction; return what holds afterwards."""
    if name in ("ARG", "ENV"):
        pairs = (word.partition("=") for word in shlex.split(words))
        found = {key: value for key, _, value in pairs}
        return replace(stage, environment=stage.environment | found)
    if name == "SHELL":
        return replace(stage, shell=tuple(json.loads(words)))
    if name == "WORKDIR":
        (stage.root / words.lstrip("/")).mkdir(parents=True, exist_ok=True)
        return replace(stage, folder=words)
    if name == "USER":
        return replace(stage, user=words)
    if name == "ENTRYPOINT":
        return replace(stage, entry=tuple(json.loads(words)))
    if name == "COPY":
        copy(stage, words, stages)
    elif name == "RUN":
        with mounted(stage.root):
            inside(stage, [*stage.shell, words])
    elif name not in ("VOLUME", "EXPOSE", "CMD"):
        raise SystemExit(f"{DOCKERFILE}: found {name}, expected an instruction that this runs")
    return stage


def fresh_root(folder: Path, image: str, name: str) -> Path:
    """Return a copy of the root filesystem that an image of Debian is made of."""
    match = BASE.fullmatch(image)
    if match is None:
        raise SystemExit(f"{DOCKERFILE}: found the image {image}, expected debian:NAME-slim")
    base, root = folder / match[1], folder / f"root-{name}"
    if not (base / "done").exists():
        shutil.rmtree(base, ignore_errors=True)
        subprocess.run(
            ["debootstrap", "--variant=minbase", match[1], str(base)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (base / "done").touch()
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["cp", "-a", str(base), str(root)], check=True)
    for file in HOST_FILES:  # where packages come from
        target = root / file.lstrip("/")
        subprocess.run(["rm", "-rf", str(target)], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if Path(file).exists():
            subprocess.run(["cp", "-aL", file, str(target)], check=True)
    shutil.copyfile(os.environ.get("PIP_CERT", CERTIFICATES), root / KEPT_CERTIFICATES[1:])
    return root


def copy(stage: Stage, words: str, stages: dict[str, Stage]) -> None:
    """Copy files of the checkout, or of an earlier stage, as COPY does."""
    *options, source, target = shlex.split(words)
    to = stage.root / (Path(stage.folder) / target).as_posix().lstrip("/")
    to.mkdir(parents=True, exist_ok=True)
    if options:
        other = stages[options[0].removeprefix("--from=")]
        subprocess.run(["cp", "-a", f"{other.root}{source}/.", str(to)], check=True)
        return
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    ignored = tuple((ROOT / ".dockerignore").read_text().split())
    for name in filter(None, listed.stdout.decode().split("\0")):
        if not name.startswith(ignored) and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def pip_folders() -> list[str]:
    """Return the folders of this host that its pip takes packages and settings from."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    paths = {Path(path) for path in re.findall(r"(?:file://|')(/[^\s']+)", listed)}
    paths |= {Path("/etc/pip.conf"), Path("/etc/xdg/pip")}
    return sorted(str(path if path.is_dir() else path.parent) for path in paths if path.exists())


@contextlib.contextmanager
def mounted(root: Path, *more: tuple[Path, str]) -> Iterator[None]:
    """Bind what a container has, and where pip takes packages from."""
    wanted = [(Path(path), path) for path in (*MOUNTS, *pip_folders())]
    wanted = [pair for pair in wanted if pair[1] not in ("/etc", "/etc/ssl/certs")]
    with contextlib.ExitStack() as stack:
        for source, place in (*wanted, *more):
            target = root / place.lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--rbind", str(source), str(target)], check=True)
            subprocess.run(["mount", "--make-rslave", str(target)], check=True)
            stack.callback(subprocess.run, ["umount", "-R", "-l", str(target)], check=True)
        yield


def inside(stage: Stage, words: list[str]) -> str:
    """Run a command of a stage; return what it prints."""
    host = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **host}
    environment["PIP_CERT"] = KEPT_CERTIFICATES
    user = [] if stage.user == "0" else [f"--userspec={stage.user}:{stage.user}"]
    start = [str(shutil.which("chroot")), *user, str(stage.root)]
    start += ["/bin/sh", "-c", 'cd "$0" && exec "$@"', stage.folder]
    done = subprocess.run(
        [*start, *words],
        env=environment | stage.environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"scripts/image_check: error: status {done.returncode}: {shlex.join(words)}")
    return done.stdout


def ask(image: Stage) -> None:
    """Let the image's own command answer a prompt with the demo model."""
    words = ["run", "/model", "-p", PROMPT, "--max_tokens", "8"]
    with mounted(image.root, (ROOT / "models" / "demo", "/model")):
        if shutil.which("gcc", path=str(image.root / "usr" / "bin")):
            sys.exit("scripts/image_check: error: found a compiler in the image, expected none")
        text = inside(image, [*image.entry, *words])
    print(text.strip())
    if not text.strip():
        sys.exit("scripts/image_check: error: found no answer, expected a text")


if __name__ == "__main__":
    sys.exit(main())
