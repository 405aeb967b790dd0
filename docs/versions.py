# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Write the tables of `limits.md`: the releases with which tests passed, and the torch that each vLLM requires.

    python docs/versions.py test tests/update tests/trainer  # runs tests; if they pass, adds a line to versions.csv
    python docs/versions.py resolve                          # runs uv's resolver, as CI does; installs nothing
    python docs/versions.py resolve --write                  # the same for each vLLM release, and writes the table
"""

import argparse
import csv
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree


HERE = Path(__file__).parent
ROOT, PAGE, RUNS = HERE.parent, HERE / "limits.md", HERE / "versions.csv"
LIBRARIES = ("torch", "transformers", "trl")
PYTHONS = ("3.11", "3.12", "3.13")
VLLMS = [f"0.{minor}.0" for minor in range(22, 34)]


# ---- Runs of tests ----


def test(paths: list[str]) -> int:
    """Run tests with this interpreter. If none fails, write the number that passed to `versions.csv` and the page."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *paths]).returncode
        suite = ElementTree.parse(report).getroot()[0].attrib
    if status == 0:
        releases = {name: version(name).partition("+")[0] for name in LIBRARIES}
        run = {"python": sys.version.split()[0], **releases, "tests": " ".join(paths)}
        run["passed"] = str(int(suite["tests"]) - int(suite["skipped"]))
        runs = [row for row in read_runs() if {**row, "passed": run["passed"]} != run]
        with RUNS.open("w", newline="") as file:
            writer = csv.DictWriter(file, run, lineterminator="\n")
            writer.writeheader()
            writer.writerows([*runs, run])
        PAGE.write_text(fill_in(PAGE.read_text(), "tested", table_of_runs()))
    return status


def read_runs() -> list[dict[str, str]]:
    if not RUNS.exists():
        return []
    with RUNS.open(newline="") as file:
        return list(csv.DictReader(file))


def table_of_runs() -> str:
    lines = ["| Python | torch | transformers | TRL | tests | passed |", "|---|---|---|---|---|---|"]
    for row in read_runs():
        folders = row["tests"].replace("tests/", "").replace(" ", ", ")
        lines.append(
            f"| {row['python']} | {' | '.join(row[name] for name in LIBRARIES)} | {folders} | {row['passed']} |"
        )
    return "\n".join(lines)


def fill_in(page: str, name: str, table: str) -> str:
    """Return the page with the current state of one of its tables."""
    start, end = f"<!-- {name}: python docs/versions.py -->", f"<!-- end of {name} -->"
    pattern = f"{re.escape(start)}.*?{re.escape(end)}"
    return re.sub(pattern, lambda _: f"{start}\n\n{table}\n\n{end}", page, flags=re.DOTALL)


# ---- Resolving requirements ----


def resolve(python: str, constraint: str = "", project: Path = ROOT) -> dict[str, str]:
    """
    Return the releases that the extra `vllm` installs, including torch with CUDA, by name.

    Raises:
        `ValueError`: If the requirements cannot be resolved, with the resolver's message.
    """
    options = ["--extra", "vllm", "--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    return compile_requirements(project / "pyproject.toml", *options, *(["-c", constraint] if constraint else []))


def compile_requirements(*arguments: str | Path, given: str | None = None) -> dict[str, str]:
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", *map(str, arguments)]
    found = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300)
    if found.returncode != 0:
        raise ValueError(found.stderr.strip())
    return dict(line.split("==") for line in found.stdout.splitlines() if "==" in line)


def check(folder: Path, project: Path = ROOT) -> int:
    """
    Resolve for every Python: without constraints, with constraints.txt, and with the oldest torch. Return 1 on
    failure.
    """
    requirements = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    (trl,) = (requirement for requirement in requirements if requirement.startswith("trl"))
    newest = compile_requirements("--no-deps", "-", given=trl)["trl"]
    (torch,) = (requirement for requirement in requirements if requirement.startswith("torch"))
    (folder / "oldest_torch.txt").write_text(torch.replace(">=", "==") + ".*")
    constraints = ("", project / "constraints.txt", folder / "oldest_torch.txt")
    with ThreadPoolExecutor(3) as pool:
        cases = [(python, str(constraint)) for python in PYTHONS for constraint in constraints]
        problems = list(pool.map(lambda case: find_problem(*case, newest, project), cases))
    for (python, constraint), problem in zip(cases, problems, strict=True):
        print(f"Python {python}, {Path(constraint).name or 'no constraints'}: {problem or 'resolves'}")
    return int(any(problems))


def find_problem(python: str, constraint: str, newest_trl: str, project: Path = ROOT) -> str | None:
    """Return why vLLM cannot be installed with a constraint and the newest TRL, or `None` if it can."""
    try:
        found = resolve(python, constraint, project)
    except ValueError as error:
        return str(error)
    if found["trl"] != newest_trl:
        return f"vLLM {found['vllm']} requires TRL {found['trl']}, but the newest TRL is {newest_trl}"
    return None


def table_of_vllm(folder: Path) -> str:
    rows = ["| vLLM | torch | newest transformers |\n|---|---|---|"]
    for release in VLLMS:
        constraint = folder / "vllm.txt"
        constraint.write_text(f"vllm=={release}")
        try:
            found = resolve("3.12", str(constraint))
        except ValueError:
            rows.append(f"| {release} | - | TRL does not take it |")
        else:
            rows.append(f"| {release} | {found['torch']} | {found['transformers']} |")
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("test").add_argument("paths", nargs="+")
    commands.add_parser("resolve").add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.command == "test":
        sys.exit(test(args.paths))
    with tempfile.TemporaryDirectory() as scratch:
        if args.write:
            PAGE.write_text(fill_in(PAGE.read_text(), "vllm", table_of_vllm(Path(scratch))))
        sys.exit(check(Path(scratch)))
