"""Builds the source distribution and the wheel, the same to the last byte each time.

    python .ci/build_dist.py dist

With the same setuptools two builds of one commit are identical: times are those of
SOURCE_DATE_EPOCH (the commit's, where it is not set), owners and modes are fixed, and the wheel is
built of the source distribution. setuptools alone leaves the times of the working tree in the
latter. Once the project has an address (see .ci/addresses.py), relative links of the README, which
a package index cannot follow, become absolute.
"""

import argparse
import gzip
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib

_ROOT = pathlib.Path(__file__).resolve().parent.parent
# What the distributions are built of. Tests and recordings are in the repository.
_SOURCES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "mars_optax", "pyproject.toml")


def absolute_links(text: str, repository: str) -> str:
    """Markdown with its relative links made links to pages of the repository, pictures to files."""
    relative = r"\((?!https?://|#|mailto:)([^)]+)\)"
    text = re.sub(rf"(!\[[^\]]*\]){relative}", rf"\1({repository}/raw/HEAD/\2)", text)
    return re.sub(rf"\]{relative}", rf"]({repository}/blob/HEAD/\1)", text)


def normalise(path: pathlib.Path, epoch: int) -> None:
    """Rewrites a .tar.gz with fixed order, times, owners and modes."""
    with tarfile.open(path) as archive:
        files = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
        executable = {m.name for m in archive if m.mode & 0o100}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(files[name]), epoch
            member.mode = 0o755 if name in executable else 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as compressed,
    ):
        compressed.write(buffer.getvalue())


def build(out: pathlib.Path, epoch: int, options: list[str]) -> None:
    """Builds both distributions into `out`."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}

    def run_build(kind: str, source: pathlib.Path) -> None:
        command = [sys.executable, "-m", "build", f"--{kind}", *options, "--outdir", out, source]
        subprocess.run([*command], env=environment, check=True)

    with tempfile.TemporaryDirectory() as scratch:
        sources = pathlib.Path(scratch, "sources")
        sources.mkdir()
        for name in _SOURCES:
            if (_ROOT / name).is_dir():
                shutil.copytree(_ROOT / name, sources / name)
            else:
                shutil.copy(_ROOT / name, sources)
        project = tomllib.loads((sources / "pyproject.toml").read_text())["project"]
        if repository := project["urls"].get("Source"):
            readme = sources / project["readme"]
            readme.write_text(absolute_links(readme.read_text(), repository))
        run_build("sdist", sources)
        (sdist,) = out.glob("*.tar.gz")
        normalise(sdist, epoch)
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        run_build("wheel", pathlib.Path(scratch, sdist.name.removesuffix(".tar.gz")))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="an empty or a new directory")
    parser.add_argument(
        "--no-isolation", action="store_true", help="take the setuptools that is installed"
    )
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty: an old build would be taken for the new one")
    epoch = (
        os.environ.get("SOURCE_DATE_EPOCH")
        or subprocess.run(
            ["git", "-C", _ROOT, "log", "-1", "--format=%ct"], stdout=subprocess.PIPE, text=True
        ).stdout
    )
    if not epoch.strip().isdecimal():
        parser.error("expected a git checkout, or whole seconds in SOURCE_DATE_EPOCH: set it")
    # Files that are generated take their modes from it.
    os.umask(0o022)
    build(out, int(epoch), ["--no-isolation"] if arguments.no_isolation else [])


if __name__ == "__main__":
    main()
