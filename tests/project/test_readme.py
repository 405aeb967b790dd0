# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The README and docs/ are correct: code runs, commands parse, tables are complete and paths exist."""

import ast
import csv
import dataclasses
import functools
import json
import re
import runpy
import shlex
import statistics
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from datasets import Dataset
from helpers import make_trainer
from trl import GRPOConfig
from trl.rewards import accuracy_reward, think_format_reward

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.entry_point import _make_parser
from trl_dapo.cli.processes import split_options
from trl_dapo.cli.train import make_parser
from trl_dapo.plan import plan
from trl_dapo.run.ledger import LEDGER_NAME, Parts
from trl_dapo.settings.recipe_files import RECIPES, find_accelerate_config, find_recipe, names_in


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
TEXT = "\n".join(PAGES.values())
# Changes to the README's example for a machine without a GPU and a fast test.
SMALL = (
    "max_steps=1, use_cpu=True, bf16=False, gradient_checkpointing=False, num_generations=4, report_to='none', "
    "per_device_train_batch_size=4, disable_tqdm=True, dynamic_sampling_max_gen_batches=1, "
)


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """
    Return the lines of indented blocks and of ```bash blocks that start one of this package's programs, with
    continuation lines joined.
    """
    text = re.sub(r"\\\n\s*", "", TEXT)
    return re.findall(r"^(?:    )?((?:trl-dapo|accelerate launch) .*?)(?:\s+#.*)?$", text, flags=re.MULTILINE)


def train_small(script: str, changes: dict[str, str], folder: Path, monkeypatch) -> dict:
    """Run a script of a page with smaller settings; return its names."""
    for given, small in changes.items():
        assert given in script
        script = script.replace(given, small)
    monkeypatch.chdir(folder)
    sums = [{"prompt": [{"role": "user", "content": f"{i} + 1"}], "solution": f"${i + 1}$"} for i in range(16)]
    names = {"load_dataset": lambda name, split: Dataset.from_list(sums)}
    exec(script, names)
    assert names["trainer"].state.global_step == 1
    return names


def test_the_grpo_script_with_two_names_changed_trains(tiny_model, tmp_path, monkeypatch):
    (diff,) = [block for block in code_blocks("diff") if "train_dataset" in block]
    before, after = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith(other)) for other in "+-"
    )
    assert "GRPOTrainer(" in before
    assert "DAPO" not in before
    compile(before, "before", "exec")
    changes = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": tiny_model,
        '"out",': '"out", dynamic_sampling_max_gen_batches=1, report_to="none",',
        "max_steps=16": "max_steps=1",
    }
    names = train_small(after, changes, tmp_path, monkeypatch)
    recipe = yaml.safe_load((RECIPES / "smollm2_135m_cpu.yaml").read_text())
    kept = ("num_generations", "max_completion_length", "learning_rate")
    assert {name: getattr(names["args"], name) for name in kept} == {name: recipe[name] for name in kept}
    assert names["args"].per_device_train_batch_size == recipe["prompts_per_rollout"] * recipe["num_generations"]
    asked = {row["prompt"][0]["content"] for row in names["dataset"]}
    assert asked == {json.loads(row)["problem"] for row in (RECIPES / recipe["dataset_name"]).open()}


def script_for_80_gb() -> str:
    return section(page("scaling_out"), "A script for 80 GB").partition("```python\n")[2].partition("```")[0]


def test_the_scripts_of_the_index_and_for_80_gb_train(tiny_model, tmp_path, monkeypatch):
    changes = {
        "Qwen/Qwen3-1.7B-Base": tiny_model,
        '"out",': f'"out", {SMALL}',
        "max_completion_length=2048": "max_completion_length=8",
        "overlong_buffer_length=512": "overlong_buffer_length=2",
        "prompts_per_rollout=64": "prompts_per_rollout=4",
        "prompts_per_step=16": "prompts_per_step=2",
        "use_vllm=True": "use_vllm=False",
        "from datasets import load_dataset\n": "",
    }
    train_small(script_for_80_gb(), changes, tmp_path, monkeypatch)
    (script,) = re.findall(r"^```python\n(.*?)^```", page("index"), flags=re.DOTALL | re.MULTILINE)
    changes = {
        "Qwen/Qwen2.5-0.5B-Instruct": tiny_model,
        '"outputs/first", ': f'"out", max_completion_length=8, {SMALL}',
        "from datasets import load_dataset\n": "",
    }
    train_small(script, changes, tmp_path, monkeypatch)


def test_the_example_of_two_rewards_makes_a_trainer(tiny_model, tmp_path, monkeypatch):
    (code,) = [block for block in code_blocks("python") if "think_format_reward" in block]
    monkeypatch.chdir(tmp_path)
    small = {"use_cpu": True, "bf16": False, "num_generations": 4, "per_device_train_batch_size": 4}
    names = {
        "DAPOConfig": functools.partial(DAPOConfig, **small),
        "DAPOTrainer": DAPOTrainer,
        "accuracy_reward": accuracy_reward,
        "think_format_reward": think_format_reward,
        "model": tiny_model,
        "args": DAPOConfig("out", **small),
        "dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "1 + 1"}], "solution": "$2$"}] * 8),
    }
    exec(code, names)
    assert (
        names["trainer"]
        ._task.describe()
        .startswith("A group is accepted if 'accuracy_reward' differs between its completions.")
    )


def test_the_script_for_80_gb_fits_as_the_plan_says(tmp_path):
    (made,) = [
        node
        for node in ast.walk(ast.parse(script_for_80_gb()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "DAPOConfig"
    ]
    settings = {keyword.arg: ast.literal_eval(keyword.value) for keyword in made.keywords}
    settings |= settings.pop("model_init_kwargs")
    settings |= {"model_name_or_path": "Qwen/Qwen3-1.7B-Base", "output_dir": "out", "dataset_name": "any"}
    (tmp_path / "example.yaml").write_text(yaml.safe_dump(settings))
    planned = plan(str(tmp_path / "example.yaml"), gpus="1xH100-80GB")
    assert planned.fits
    text = " ".join(page("scaling_out").split())
    assert f"a peak of {planned.peak / 2**30:.1f} of {planned.recipe.cluster.gpu.memory / 2**30:.1f} GiB" in text


def test_the_ledger_of_the_readme_is_read(tmp_path, monkeypatch, capsys):
    (code,) = [block for block in code_blocks("python") if "read_ledger" in block]
    parts = Parts(tmp_path / "outputs" / "run" / LEDGER_NAME)
    parts.begin(0)
    parts.append(pa.table({"step": [1, 1, 1], "drop_reason": [None, "all_wrong", "all_wrong"]}))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "all_wrong", "2"] in printed
    assert ["NaN", "1"] in printed


@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_every_command_parses(command, launched_on):
    program, *argv = shlex.split(command, comments=True)
    if "&&" in argv:
        argv = argv[: argv.index("&&")]
    if program == "accelerate" or argv[0] == "train":
        if "--config" not in argv:
            make_parser().parse_args_and_config([*argv[1:], "--use_cpu", "true", "--bf16", "false"])
            return
        named = argv[argv.index("--config") + 1]
        recipe = ROOT / named if program == "accelerate" else find_recipe(named)
        start = next(i for i, word in enumerate(argv) if word in ("recipes/train_dapo.py", "train"))
        if "--config_file" in argv[:start]:
            launched_on(load_config_from_file(str(ROOT / argv[argv.index("--config_file") + 1])).num_processes)
        assert recipe.exists()
        asked, rest = split_options(argv[start + 1 :], {"accelerate_config": True})
        for word in asked:
            launched_on(load_config_from_file(str(find_accelerate_config(word.partition("=")[2]))).num_processes)
        rest = [str(recipe) if word == named else word for word in rest]
        parser = make_parser()
        rest = split_options(rest, parser.launch_options)[1]
        parser.parse_args_and_config([*rest, "--use_cpu", "true", "--bf16", "false"])
    else:
        _make_parser().parse_args(argv)


def test_every_command_of_the_command_line_is_shown():
    shown = {command.split()[1] for command in commands() if command.startswith("trl-dapo")}
    assert {"train", "plan", "recipes", "eval", "compare", "report"} <= shown
    assert "trl-dapo quickstart" in README
    assert "trl-dapo recipes --show NAME" in TEXT


def test_every_recipe_and_every_added_field_is_in_its_table():
    text = (RECIPES / "README.md").read_text()
    assert sorted(re.findall(r"^\| `((?:qwen|smo)[\w.]*)`", text, re.MULTILINE)) == sorted(names_in(RECIPES))
    added = {field.name for field in dataclasses.fields(DAPOConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}
    assert [name for name in sorted(added) if f"\n| `{name}` |" not in page("configuration")] == []


def test_every_metric_of_the_sampler_is_explained(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1)
    trainer.train()
    prefix = "dynamic_sampling/"
    names = {name.removeprefix(prefix) for name in trainer.state.log_history[0] if name.startswith(prefix)}
    assert "rounds" in names
    names = {"dropped/<reason>" if name.startswith("dropped/") else name for name in names}
    assert sorted(name for name in names if f"`{name}`" not in page("reading_a_run")) == []


def page(name: str) -> str:
    return PAGES[ROOT / "docs" / f"{name}.md"]


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def table_cells(text: str) -> list[list[str]]:
    """Return the rows of a text's Markdown tables, without heads and rules."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)
    ]
    rules = [i for i, row in enumerate(rows) if re.fullmatch("[-:]+", row[0])]
    return [row for i, row in enumerate(rows) if i not in rules and i + 1 not in rules]


def test_the_readmes_figures_of_the_quickstart_are_medians_and_ranges_of_its_five_seeds():
    with (ROOT / "benchmarks" / "quickstart_seeds.csv").open() as file:
        runs = [{name: float(value) for name, value in run.items()} for run in csv.DictReader(file)]
    assert [run["seed"] for run in runs] == [42, 43, 44, 45, 46]
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    differences = [100 * run["difference"] for run in runs]
    text = " ".join(section(README, "Install and try it").split())
    assert (
        f"rises from {median['before']:.1%} to {median['grpo']:.1%} with `GRPOTrainer` in {median['grpo_steps']:.0f} "
        f"steps, and to {median['dapo']:.1%} with `DAPOTrainer` in {median['dapo_steps']:.0f} (medians)"
    ) in text
    low, high = min(differences), max(differences)
    assert f"is {100 * median['difference']:+.1f} points (median; {low:+.1f} to {high:+.1f})" in text
    assert round(median["cpu_seconds"] / 60) == 3
    assert "takes three CPU minutes" in text


def test_the_evidence_of_the_quickstart_has_the_figures_of_its_seeds():
    with (ROOT / "benchmarks" / "quickstart_seeds.csv").open() as file:
        runs = [{name: float(text) for name, text in run.items()} for run in csv.DictReader(file)]
    assert [run["seed"] for run in runs] == [42, 43, 44, 45, 46]

    def spread(values, form):
        return tuple(form.format(value) for value in (statistics.median(values), min(values), max(values)))

    evidence = " ".join((ROOT / "benchmarks" / "EVIDENCE.md").read_text().split())
    least = [f"{100 * min(run[name] - run['before'] for run in runs):.1f}" for name in ("grpo", "dapo")]
    assert "the worst seed gains {} points with `GRPOTrainer` and {} with `DAPOTrainer`".format(*least) in evidence
    informative = spread([run["grpo_informative"] for run in runs], "{:.0%}")
    assert "{} of the groups have a gradient ({} to {})".format(*informative) in evidence
    seconds = spread([run["cpu_seconds"] for run in runs], "{:.0f}")
    assert "{} CPU seconds of one core ({} to {})".format(*seconds) in evidence
    signs = [(run["difference_low"] > 0) - (run["difference_high"] < 0) for run in runs]
    assert (signs.count(1), signs.count(-1), signs.count(0)) == (1, 2, 2)
    said = "`DAPOTrainer` is ahead with one of five seeds, behind with two, and with two neither is certain"
    assert said in evidence


def test_every_path_that_is_named_exists():
    folders = "trl_dapo|tests|recipes|benchmarks|notebooks|requirements|docs"
    missing = []
    for path, text in PAGES.items():
        named = [ROOT / name for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text)]
        named += [path.parent / link for link in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", text)]
        missing += [str(name) for name in named if not name.exists()]
    assert missing == []


def test_every_page_is_linked_from_the_readme_and_the_index():
    pages = {path.name for path in PAGES if path.parent != ROOT}
    assert pages - {name for name in pages if f"](docs/{name})" in README} == {"index.md"}
    assert pages - {name for name in pages if f"]({name})" in page("index")} == {"index.md"}


def test_the_page_of_settings_is_written_from_the_docstring():
    script = runpy.run_path(str(ROOT / "docs" / "configuration.py"))
    assert script["PAGE"].read_text() == script["describe"](DAPOConfig.__doc__)
