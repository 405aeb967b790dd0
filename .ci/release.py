# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Builds a release for an index: `dist/` with the source distribution, the wheel and `notes.md`.

    pip install build twine
    python .ci/release.py https://where.the/repository/is

Beside what git knows, README's pictures and links get absolute addresses, and the project its `[project.urls]`: both
from the address of the repository.
"""

import argparse
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)]+)\)")
URLS = """
[project.urls]
Documentation = "{blob}/docs/index.md"
Changelog = "{blob}/CHANGELOG.md"
Source = "{repository}"
Issues = "{repository}/issues"
"""


def with_addresses(page: str, repository: str, tag: str) -> str:
    """A page whose relative links and pictures are those of a tag of the repository."""

    def absolute(link: re.Match) -> str:
        picture, text, path = link.groups()
        return f"{picture}{text}({repository}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return LINK.sub(absolute, page)


def notes(changelog: str, version: str) -> str:
    """What the changelog says of a version."""
    found = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", changelog, flags=re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no version {version}.")
    return found[1].strip() + "\n"


def build(repository: str, folder: Path) -> None:
    version = runpy.run_path(str(ROOT / "trl_dapo" / "version.py"))["__version__"]
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as copy:
        for name in files.strip("\0").split("\0"):
            (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(copy) / name)
        readme, project = Path(copy) / "README.md", Path(copy) / "pyproject.toml"
        readme.write_text(with_addresses(readme.read_text(), repository, f"v{version}"))
        urls = URLS.format(repository=repository, blob=f"{repository}/blob/v{version}")
        project.write_text(project.read_text().replace("\n[project.optional-", f"{urls}\n[project.optional-", 1))
        subprocess.run([sys.executable, "-m", "build", "--outdir", folder, copy], check=True)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *folder.glob("trl_dapo-*")], check=True)
    (folder / "notes.md").write_text(notes((ROOT / "CHANGELOG.md").read_text(), version))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=lambda address: address.rstrip("/"))
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    build(args.repository, args.outdir.absolute())
