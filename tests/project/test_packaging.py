# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Contents of a wheel, and what it can do in an environment without the repository."""

import ast
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "trl_dapo", "recipes")


def run(*command, cwd: Path) -> str:
    """Return the output of a command that runs without the repository in its path and without data."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRL_DAPO_DATA")}
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=200, cwd=cwd, env=environment
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy in which nothing was built before
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """
    Return the programs of an environment with the wheel, and with everything that is installed in this one except the
    package.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import site; print(*site.getsitepackages())", cwd=folder).split()[0])
    # A path file adds folders but not the path files in them, one of which would lead to the repository.
    (packages / "installed.pth").write_text("\n".join(site.getsitepackages()))
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--ignore-installed")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    return folder / "bin"


def test_a_wheel_holds_every_module_and_every_recipe_once(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert len(names) == len(set(names))
    modules = {f"{path.relative_to(ROOT)}" for path in (ROOT / "trl_dapo").rglob("*.py")}
    patterns = ("*.yaml", "*.jsonl", "*/*.yaml", "*/*.sbatch")
    recipes = [path for pattern in patterns for path in (ROOT / "recipes").glob(pattern)]
    assert len(recipes) >= 15
    assert (modules | {f"trl_dapo/{path.relative_to(ROOT)}" for path in recipes}) - set(names) == set()
    assert "trl_dapo/py.typed" in names  # without it, type checkers treat the package as untyped
    # Two copies, because the ablation and files that a test left could be in the wheel by accident.
    assert [name for name in names if name.startswith("recipes/") or "ablation" in name] == []


def test_recipes_of_a_wheel_are_listed_and_shown_and_planned(programs, tmp_path):
    listed = run(programs / "trl-dapo", "recipes", cwd=tmp_path)
    assert f"Files in:    {programs.parent}" in listed
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        first_lines = [line.removeprefix("# ") for line in recipe.read_text().splitlines()[:2]]
        assert "\n".join([recipe.stem, *(f"  {line}" for line in first_lines)]) in listed
        assert [line.split(":")[0] for line in first_lines] == ["Hardware", "Trains"]
    shown = run(programs / "trl-dapo", "recipes", "--show", "qwen3_1.7b_dapo", cwd=tmp_path)
    assert shown == (ROOT / "recipes" / "qwen3_1.7b_dapo.yaml").read_text()
    for recipe in ("smoke_cpu", "qwen2.5_32b_dapo"):
        said = run(programs / "trl-dapo", "plan", "--config", recipe, cwd=tmp_path)
        assert said.splitlines()[-1].startswith("Fits: peak ")


def test_a_wheel_trains_the_smoke_recipe_by_name_without_the_repository_or_data(programs, tmp_path):
    options = ("--accelerate_config", "cpu", "--max_steps", "1")
    said = run(programs / "trl-dapo", "train", "--config", "smoke_cpu", *options, cwd=tmp_path)
    assert "Rollout: 4 prompts x 4 completions" in said
    assert (tmp_path / "outputs" / "smoke_cpu" / "model.safetensors").is_file()
    # The recipe was that of the wheel.
    where = run(programs / "python", "-c", "import trl_dapo; print(trl_dapo.__file__)", cwd=tmp_path)
    assert where.startswith(str(programs.parent))


def test_what_the_package_imports_is_declared_and_nothing_else():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", requirement)[0].lower().replace("-", "_") for requirement in declared}
    imported = set()
    for path in (ROOT / "trl_dapo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            imported |= {module.split(".")[0] for module in modules}
    imported = {"pyyaml" if name == "yaml" else name for name in imported - sys.stdlib_module_names}
    # Only needed with a server or an engine, which the extra installs: `trl[vllm]`.
    assert imported - names - {"trl_dapo"} == {"vllm", "requests", "urllib3"}
    assert names - imported == set()


def test_every_lower_bound_is_the_version_that_ci_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements" / "lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    lowest = {canonicalize_name(name): Version(version) for name, version in lowest.items()}
    for requirement in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["test"]]):
        (bound,) = (part.version for part in requirement.specifier if part.operator in (">=", "=="))
        assert lowest[canonicalize_name(requirement.name)] == Version(bound), requirement


def test_a_release_has_the_readmes_pictures_and_links_by_address_and_the_notes_of_its_version():
    release = runpy.run_path(str(ROOT / ".ci" / "release.py"))
    page, address = (ROOT / "README.md").read_text(), "https://example.org/it"
    absolute = release["with_addresses"](page, address, "v1.2.3")
    paths = re.findall(rf"\]\({address}/(?:blob|raw)/v1\.2\.3/([^)#]+)", absolute)
    assert len(paths) == len(release["LINK"].findall(page)) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert release["LINK"].findall(absolute) == []
    assert f"]({address}/raw/v1.2.3/benchmarks/images/" in absolute
    changelog = "# Changelog\n\n## 1.2.3 (now)\n\n- New.\n\n## 1.2.2\n\n- Old.\n"
    assert release["notes"](changelog, "1.2.3") == "- New.\n"
    with pytest.raises(ValueError, match=r"no version 1\.2\.4"):
        release["notes"](changelog, "1.2.4")
