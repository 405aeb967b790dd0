# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings, metrics and maps on the pages of docs/ are those of the code."""

import re
import runpy
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from trl_dapo import DAPOConfig
from trl_dapo.run.stopwatch import Stopwatch
from trl_dapo.update.step_metrics import metrics_of_passes, metrics_of_tokens
from trl_dapo.version import __version__


ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^## (.*?)\n+```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
PAPERS = dict(BLOCK.findall((ROOT / "docs" / "papers.md").read_text()))


def explained() -> list[str]:
    """Return the metrics that docs/reading_a_run.md lists, with `*` for any part of a name."""
    page = (ROOT / "docs" / "reading_a_run.md").read_text().partition("## Logged metrics")[2]
    return [re.sub(r"<\w+>", "*", name) for name in re.findall(r"`([^`\s]+)`", page)]


@pytest.mark.parametrize(
    "metrics",
    [
        metrics_of_tokens(
            dict.fromkeys(("clip_units_0", "region_0", "kl", "weights"), 1.0) | defaultdict(lambda: 1.0)
        ),
        metrics_of_passes(defaultdict(lambda: 1.0), 1),
        Stopwatch(has_server=True).timeline(),
    ],
    ids=["tokens", "passes", "time"],
)
def test_every_metric_of_an_optimizer_step_is_explained(metrics):
    assert len(metrics) > 3
    listed = [pattern for name in explained() for pattern in (name, f"*/{name}")]
    assert [name for name in metrics if not any(fnmatch(name, pattern) for pattern in listed)] == []


def config_of(paper: str, tmp_path) -> DAPOConfig:
    """Return the config that a block of docs/papers.md makes, on a machine without a GPU."""
    names = {"DAPOConfig": lambda folder, **given: DAPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)}
    exec(PAPERS[paper], names)
    return names["args"]


@pytest.mark.parametrize("paper", PAPERS)
def test_the_settings_of_each_paper_make_a_config(paper, tmp_path):
    assert config_of(paper, tmp_path).beta == 0.0


def test_the_settings_of_the_papers_are_what_the_page_says(tmp_path):
    made = {paper: config_of(paper, tmp_path) for paper in PAPERS}
    assert list(made) == ["DAPO", "Dr. GRPO", "GSPO", "CISPO", "Polaris"]
    clips = {paper: (args.epsilon, args.epsilon_high) for paper, args in made.items()}
    assert clips == {
        "DAPO": (0.2, 0.28),
        "Dr. GRPO": (0.2, 0.2),
        "GSPO": (3e-4, 4e-4),
        "CISPO": (0.2, 5.0),
        "Polaris": (0.2, 0.28),
    }
    # 512 prompts are 16 steps of 32, and the warm-up is 20 rollouts. GSPO's 64 prompts are four steps of 16.
    steps = {paper: args.steps_per_generation // args.gradient_accumulation_steps for paper, args in made.items()}
    assert (steps["DAPO"], steps["GSPO"], made["DAPO"].warmup_steps) == (16, 4, 20 * 16)
    assert {paper: args.loss_type for paper, args in made.items() if args.loss_type != "dapo"} == {
        "Dr. GRPO": "dr_grpo",
        "GSPO": "grpo",
        "CISPO": "cispo",
    }


def test_the_map_of_the_design_is_what_the_files_say():
    script = runpy.run_path(str(ROOT / "docs" / "package_map.py"))
    page = script["PAGE"].read_text()
    assert script["fill_in"](page) == page
    assert "  sampling/        Dynamic sampling:" in page


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    assert citation["preferred-citation"]["url"].endswith("2503.14476")
