# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import base64
import json
import os
import shutil
from html.parser import HTMLParser

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import prompts
from trl import GRPOConfig, GRPOTrainer

from trl_dapo.cli import main
from trl_dapo.report import PANELS, load_log_history, load_run, load_runs, plot_run, series, write_report
from trl_dapo.report.drawing import (
    ACCEPTED,
    ACCURACY_BY_TOKENS,
    OF_SEVERAL_RUNS,
    OUTCOMES,
    REWARD_BY_TOKENS,
    RUN_COLOURS,
    TIMELINE,
    plot_comparison,
    plot_panel,
)
from trl_dapo.report.html import MAX_CHARACTERS
from trl_dapo.report.runs import summarize_groups


PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    '</pre><style>body{display:none}</style><a href="javascript:void(0)">\'"&amp;'
)

TIMES = {"sampling": 6.0, "update": 5.0, "rewards": 2.0, "other": 1.0}


def entry(step: int, **metrics) -> dict:
    """Return the log entry of DAPOTrainer for a step in which 6 of 16 groups were accepted."""
    sampling = {"groups_generated": 16.0, "acceptance_rate": 6 / 16, "rounds": 2.0}
    sampling |= {"dropped/all_correct": 7.0, "dropped/all_wrong": 3.0, "dropped/masked": 0.0}
    sampling |= {"tokens_generated": 800.0, "tokens_trained": 320.0, "groups_trained": 6.0, "shortfall": 10.0}
    rewards = {"reward": 0.1 * step, "trained_reward": 0.1 * step + 0.05, "task_accuracy": 0.01 * step}
    return {
        **{"step": step, **rewards, "entropy": 1.0 / step, "grad_norm": 0.5},
        **{"microbatches": 4.0, "peak_microbatch_tokens": 9216.0},
        **{f"clip_ratio/{name}": 0.01 for name in ("low_mean", "high_mean", "dual_mean")},
        **{f"completions/{name}": 8.0 for name in ("mean_length", "max_length")},
        "completions/clipped_ratio": 0.25,
        "num_tokens": 1000.0 * step,
        **{f"dynamic_sampling/{name}": value for name, value in sampling.items()},
        **{f"timeline/{name}_seconds": value for name, value in TIMES.items()},
        **metrics,
    }


def grpo_entry(step: int, **metrics) -> dict:
    """Return the log entry of GRPOTrainer for a step in which the rewards of 6 of 16 groups were all equal."""
    rewards = {"reward": 0.1 * step, "reward_std": 0.3, "rewards/right/mean": 0.1 * step, "rewards/right/std": 0.3}
    return {
        **{"step": step, **rewards, "frac_reward_zero_std": 6 / 16, "num_tokens": 900.0 * step},
        **{"entropy": 1.0 / step, "grad_norm": 0.5, "loss": 0.0, "learning_rate": 1e-4},
        **{f"completions/{name}": 8.0 for name in ("mean_length", "max_length", "mean_terminated_length")},
        "completions/clipped_ratio": 0.25,
        **{f"clip_ratio/{name}": 0.01 for name in ("low_mean", "high_mean", "region_mean")},
        **metrics,
    }


def plain(step: int) -> dict:
    """Return a log entry with a single metric, so that only one picture has to be drawn."""
    return {"step": step, "reward": 0.1 * step}


def write_state(folder, log_history: list[dict], max_steps: int = 100):
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": log_history[-1]["step"], "max_steps": max_steps, "log_history": log_history}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def write_completions(run, step: int, rows: list[dict]):
    (run / "completions").mkdir(exist_ok=True)
    written = pd.DataFrame([{"prompt": "p", "advantage": 0.0, "step": step, **row} for row in rows]).to_parquet()
    (run / "completions" / f"completions_{step:05d}.parquet").write_bytes(written)


def group(rollout: int, prompt_id: str, correct: int | None, drop_reason: str | None = None, **columns) -> dict:
    """Return a ledger row: a group of 4 completions with 5 tokens each. The first `correct` of them are correct."""
    row = {"rollout": rollout, "step": rollout + 1, "round": 1, "prompt_id": prompt_id, "source": None}
    row |= {"outcome": "dropped" if drop_reason else "trained", "drop_reason": drop_reason}
    row |= {"correct": correct, "scored": 4, "tokens": 20, "lengths": [5] * 4, "truncated": [False] * 4}
    row |= {"rewards/right": [float(i < (correct or 0)) for i in range(4)], "prompt": None, "completions": None}
    return row | columns


def ledger_of(*rows: dict) -> pa.Table:
    table = pa.Table.from_pylist(list(rows))
    kinds = {"source": pa.string(), "drop_reason": pa.string(), "correct": pa.int16(), "prompt": pa.string()}
    kinds["completions"] = pa.list_(pa.string())
    for name, kind in kinds.items():
        table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
    return table


def write_ledger(run, *rows: dict):
    (run / "rollouts").mkdir()
    with (run / "rollouts" / "part-00001.parquet").open("wb") as file:
        pq.write_table(ledger_of(*rows), file)


def write_summary(folder, num_correct: list[int], written: int, finished: str | None = None, k: int = 4):
    """Write the summary of an evaluation with these numbers of correct completions among `k` per problem."""
    folder.mkdir(parents=True)
    same = {"source": "s", "num_completions": k, "maj": 0.0}
    problems = [{"id": str(i), "num_correct": count, **same} for i, count in enumerate(num_correct)]
    mean = sum(num_correct) / k / len(num_correct)
    summary = {"settings": {"k": k, "model": folder.name}, "scorer": "exact", "problems": problems}
    summary |= {} if finished is None else {"finished": finished}
    summary["metrics"] = {f"avg@{k}": {"mean": mean, "low": mean, "high": mean}}
    (folder / "summary.json").write_text(json.dumps(summary))
    os.utime(folder / "summary.json", (written, written))


@pytest.fixture
def run(tmp_path):
    """The folder of a run with the shortest log that a report can show."""
    return write_state(tmp_path / "run", [plain(1)])


class Page(HTMLParser):
    """The tags of a page with their attributes, its text, and that of each cell of its tables."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self.cells = [], "", [""]
        self.source = path.read_text("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        self.text += data
        self.cells[-1] += data

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


def text_of(*runs) -> str:
    return Page(write_report(runs)).text


@pytest.fixture(scope="module")
def hostile_runs(tmp_path_factory):
    """Two runs that log everything, with hostile texts of the model, the rewards and the folders."""
    root = tmp_path_factory.mktemp("runs")
    runs = [root / "_a$\\frac$ <b>bold", root / "second"]
    for run, reward in zip(runs, (0.12, 0.1), strict=True):
        asked = {"rollouts_ahead/in_flight": 40.0}
        history = [entry(step, reward=reward * step, entropy=10 * reward / step, **asked) for step in range(1, 41)]
        history += [{"step": 40, "eval_avg@4": 0.625, "eval_pass@4": 0.75, "eval_reward": 0.625}]
        write_state(run, [*history, {"step": 40, "train_runtime": 12.0}], max_steps=40)
        unseen = "\x00\x1b[2J\u202eright to left\n" + "\n" * 900
        rows = [
            {"completion": HOSTILE, "advantage": 1.5, "right": 1.0, "note": HOSTILE},
            {"completion": unseen, "advantage": 0.2, "right": 0.5, "note": None},
            {"completion": "w" * 100_000, "advantage": -1.5, "right": 0.0, "note": "\x07"},
        ]
        write_completions(run, 40, [{"prompt": [{"role": "user", "content": f"{HOSTILE} prompt"}], **r} for r in rows])
        texts = {"prompt": f"{HOSTILE} asked", "completions": [HOSTILE, "\x1b[2J", "w" * 100_000, ""]}
        hostile = {"source": f"{HOSTILE} source", "rewards/<b>": [-1234567.891] * 4, **texts}
        others = [group(i, f"2 digits/{20 + i % 7}*65", i % 4, source=["aime", "a" * 64][i % 2]) for i in range(40)]
        write_ledger(run, group(0, HOSTILE, 0, HOSTILE, **hostile), *({"rewards/<b>": None, **row} for row in others))
        changed = {"epsilon_high": {"value": reward, "default": 0.28}, HOSTILE: {"value": HOSTILE, "default": None}}
        (run / "settings.json").write_text(json.dumps(changed))
        for name, right, written in (("before", [1, 2, 3], 10), ("after", [4, 2, 4], 20)):
            write_summary(run / name, right, written)
    return runs


@pytest.fixture(scope="module")
def hostile_page(hostile_runs, tmp_path_factory):
    return write_report(hostile_runs, tmp_path_factory.mktemp("report"))


def test_entries_without_the_metric_or_without_a_number_are_left_out():
    values = [0.5, None, float("nan"), float("-inf"), "0.5", 10**400]
    history = [{"step": step, "reward": value} for step, value in enumerate(values)]
    assert series([*history, {"step": 9}], "reward") == ([0], [0.5])


def test_only_entries_with_both_metrics_are_drawn_over_each_other():
    history = [
        {"step": 1, "reward": 0.5, "num_tokens": 90.0},
        {"step": 2, "reward": 0.6},
        {"step": 3, "num_tokens": 3},
    ]
    assert series(history, "reward", over="num_tokens") == ([90], [0.5])


def test_the_newest_complete_state_of_a_run_is_read_and_half_written_ones_are_noted(tmp_path):
    for step in (2, 10):
        write_state(tmp_path / f"checkpoint-{step}", [{"step": step, "reward": 0.0}])
    for step, text in ((12, '{"global_step": 12, "log_hi'), (13, "[" * 100_000), (14, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    run = load_run(tmp_path)
    assert run.checkpoint == "checkpoint-10"
    assert run.log_history == load_log_history(tmp_path) == [{"step": 10, "reward": 0.0}]
    assert run.notes == [
        "checkpoint-12/trainer_state.json is incomplete. The checkpoint is left out.",
        "checkpoint-13/trainer_state.json is incomplete. The checkpoint is left out.",  # nested too deep
        "checkpoint-14/trainer_state.json is missing. The checkpoint is left out.",
    ]


def test_the_growing_log_is_read_up_to_where_the_run_was_killed(tmp_path):
    write_state(tmp_path / "checkpoint-2", [{"step": 2, "reward": 0.2}])
    lines = [json.dumps({"step": step, "reward": 0.1, "max_steps": 9}) for step in (1, 2, 3)]
    (tmp_path / "log_history.jsonl").write_bytes("\n".join([*lines, '{"step": 4, "rew\u00e9']).encode()[:-1])
    run = load_run(tmp_path)
    assert [(entry["step"], entry["reward"]) for entry in run.log_history] == [(1, 0.1), (2, 0.1), (3, 0.1)]
    assert (run.last_step, run.max_steps, run.finished) == (3, 9, False)
    assert run.notes == ["log_history.jsonl: 1 of 4 lines are incomplete and left out."]


def test_a_log_without_metrics_is_an_error(tmp_path):
    write_state(tmp_path / "checkpoint-2", [{"step": 2, "reward": "high"}])
    with pytest.raises(ValueError, match="contains no metric that a report shows"):
        write_report([tmp_path])
    assert not (tmp_path / "report").exists()


ENDED = {"step": 40, "train_runtime": 9.0}


@pytest.mark.parametrize(
    ("log_history", "state"),
    [
        ([plain(40)], "not finished: running, or stopped at step 40 of 100; no checkpoint to resume from"),
        ([plain(100)], "finished, step 100"),
        ([plain(40), ENDED, {"step": 40, "eval_reward": 0.1}], "finished early, at step 40"),
        ([ENDED, plain(41)], "not finished: running, or stopped at step 41"),  # extended
    ],
)
def test_the_table_shows_the_state_of_a_run(tmp_path, log_history, state):
    assert state in Page(write_report([write_state(tmp_path / "run", log_history)])).text


def test_the_figures_in_the_table_are_from_the_log(tmp_path):
    history = [entry(1, **{"eval_avg@32": 0.0625}), entry(2, **{"eval_avg@32": 0.125})]
    history[0]["dynamic_sampling/tokens_generated"] = 480.0
    text = text_of(write_state(tmp_path / "run", history))
    # The last step's reward, and that of its trained groups; 6 of 16 groups accepted; 1,280 tokens for 640.
    assert all(figure in text for figure in ("0.200", "0.250", "38%", "2.00", "6.2% -> 12.5%\navg@32 at step 2"))
    assert "Correct completions" in text
    assert "for the same tokens" not in text  # that compares several runs


def test_groups_are_split_into_accepted_and_the_reasons_that_occurred():
    shares = OUTCOMES.find([entry(1), entry(2, **{"dynamic_sampling/groups_generated": 0.0})])
    assert shares == {"accepted": ([1], [6 / 16]), "all_correct": ([1], [7 / 16]), "all_wrong": ([1], [3 / 16])}
    # A user's own rule has reasons of its own.
    shares = OUTCOMES.find([entry(step, **{"dynamic_sampling/dropped/too easy": 2.0}) for step in (1, 2)])
    assert (shares["too easy"], shares["accepted"]) == (([1, 2], [2 / 16] * 2), ([1, 2], [4 / 16] * 2))


def test_the_share_of_accepted_groups_of_dapo_and_of_grpo():
    # 6 of 16 places of DAPO's batch were filled; the rewards of 6 of 16 groups of GRPO's were all equal.
    assert ACCEPTED.find([entry(1)]) == {"accepted": ([1], [6 / 16])}
    assert ACCEPTED.find([grpo_entry(1)]) == {"accepted": ([1], [10 / 16])}
    # Groups that DAPO dropped and replaced do not count.
    full = {"dynamic_sampling/groups_trained": 16.0, "dynamic_sampling/shortfall": 0.0, "frac_reward_zero_std": 0.5}
    assert ACCEPTED.find([entry(1, **full)]) == {"accepted": ([1], [1.0])}
    assert ACCEPTED.find([plain(1)]) == {}


def test_the_page_of_a_grpo_run_leaves_out_metrics_of_dapo(tmp_path):
    run = write_state(tmp_path / "grpo" / "checkpoint-2", [grpo_entry(1), grpo_entry(2)], max_steps=2).parent
    page = Page(write_report([run]))
    assert load_run(run).notes == []
    cells = [" ".join(cell.split()) for cell in page.cells]
    grpo = cells.index("grpo")
    assert cells[grpo - 5 : grpo] == [
        "run",
        "state",
        "reward",
        "accepted groups in a batch",
        "tokens, prompts included",
    ]
    # The reward of the last step; 10 of 16 groups; twice 900 tokens.
    assert cells[grpo + 2 : grpo + 4] == ["0.200", "62%"]
    assert cells[grpo + 4].startswith("1.8k")
    drawn = "reward entropy length accepted truncation clipping gradient".split()
    assert [figure["id"] for figure in page.all("figure")] == drawn
    left_out = page.text.partition("Left out, because nothing was logged: ")[2].partition(".")[0].split(", ")
    assert {"Acceptance rate", "Rounds of generation", "Tokens generated and trained"} <= {*left_out}


def test_a_report_reads_the_log_of_grpo_trainer(tiny_model, tmp_path):
    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 1, "max_steps": 2}
    on_the_cpu = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}
    saved = {"logging_steps": 1, "save_steps": 2}

    def first_of_four(completions, **kwargs):  # of the first of two prompts, so that the second has no gradient
        return [1.0, *[0.0] * (len(completions) - 1)]

    args = GRPOConfig(str(tmp_path), **settings, **on_the_cpu, **saved)
    trainer = GRPOTrainer(tiny_model, first_of_four, args, train_dataset=prompts(4))
    trainer.train()
    run = load_run(tmp_path)
    assert (run.checkpoint, run.finished, run.notes) == ("checkpoint-2", True, [])
    assert ACCEPTED.find(run.log_history) == {"accepted": ([1, 2], [0.5, 0.5])}
    # 8 completions of one token, each behind the 9 of `prompt 3:`.
    assert REWARD_BY_TOKENS.find(run.log_history) == {"all sampled groups": ([80, 160], [0.125, 0.125])}


def test_a_run_of_grpo_and_one_of_dapo_are_drawn_over_each_other(tmp_path):
    full = {"dynamic_sampling/groups_trained": 16.0, "dynamic_sampling/shortfall": 0.0}
    grpo = write_state(tmp_path / "grpo", [grpo_entry(1), grpo_entry(2)])
    dapo = write_state(tmp_path / "dapo", [entry(1, **full), entry(2, **full)])
    page = Page(write_report([grpo, dapo]))
    alts = dict(zip([figure["id"] for figure in page.all("figure")], page.all("img"), strict=True))
    said = "grpo, accepted: 0.625 at step 1, 0.625 at step 2"
    assert said in alts["accepted"]["alt"]
    assert "dapo, accepted: 1 at step 1, 1 at step 2" in alts["accepted"]["alt"]
    by_tokens = alts["reward_by_tokens"]["alt"]
    assert "over tokens sampled so far, prompts included." in by_tokens
    assert "grpo, all sampled groups: 0.1 at 900 tokens, 0.2 at 1,800 tokens" in by_tokens
    assert "dapo, all sampled groups: 0.1 at 1,000 tokens, 0.2 at 2,000 tokens" in by_tokens
    # Only the log of DAPO has the share of correct completions, so the comparison is left out.
    assert "accuracy_by_tokens" not in alts
    assert "grpo" not in alts["accuracy"]["alt"]
    # A dash, not a zero, for metrics that GRPO does not log.
    cells = [" ".join(cell.split()) for cell in page.cells]
    assert cells[cells.index("grpo") + 2 : cells.index("dapo")] == ["0.200", "-", "-", "62%", "-", "-", "1.8k"]


def test_the_horizontal_axis_of_a_comparison_by_tokens_is_the_number_of_tokens():
    for panel, top in ((REWARD_BY_TOKENS, 0.2), (ACCURACY_BY_TOKENS, 0.02)):
        (axes,) = plot_panel(panel, [[entry(1), entry(2)]] * 2, ["a", "b"]).axes
        assert [list(line.get_xdata()) for line in axes.lines] == [[1000, 2000]] * 2
        assert [line.get_ydata()[-1] for line in axes.lines] == [top] * 2
        assert axes.get_xlabel() == "tokens sampled so far, prompts included"


def test_a_comparison_is_one_picture_of_several_runs(tmp_path):
    plot_comparison({"a": [grpo_entry(1)], "b": [entry(1)]}, tmp_path / "new" / "run.png")
    assert (tmp_path / "new" / "run.png").read_bytes()[:8] == PNG


def test_the_timeline_shows_the_phases_of_the_last_eight_rollouts():
    (axes,) = plot_panel(TIMELINE, [[entry(step) for step in range(1, 11)]], [""]).axes
    # 5 s of updates, 1 of an evaluation, 6 of sampling, 2 of scoring; each in the middle of its rollout's line.
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 5), (5, 1), (6, 6), (12, 2)] * 8
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(step) for step in range(3, 11)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["update", "other", "sampling", "rewards"]


def test_panels_without_data_are_left_out_and_named(tmp_path):
    path = write_report([write_state(tmp_path / "run", [plain(1), plain(2)])])
    page = Page(path)
    others = [panel.title for panel in PANELS if panel.name != "reward" and panel not in OF_SEVERAL_RUNS]
    assert f"Left out, because nothing was logged: {', '.join(others)}." in page.text
    assert [figure["id"] for figure in page.all("figure")] == ["reward"]
    assert sorted(os.listdir(path.parent)) == ["overview.png", "report.html", "reward.png"]
    plot_run([plain(1)], tmp_path / "plots" / "run.png")
    for picture in (path.parent / "reward.png", tmp_path / "plots" / "run.png"):
        assert picture.read_bytes()[:8] == PNG


def test_the_page_needs_no_other_file_and_describes_every_picture_in_words(hostile_page):
    page = Page(hostile_page)
    images = {figure["id"]: image for figure, image in zip(page.all("figure"), page.all("img"), strict=True)}
    assert list(images) == [*(panel.name for panel in PANELS), "sources"]
    # A twentieth of 40 steps is 2: (0.1 + 0.2) / 2 ... (3.9 + 4.0) / 2.
    said = "second, all sampled groups: 0.1 at step 1, 3.95 at step 40, between 0.1 and 3.95."
    assert said in images["reward"]["alt"]
    named = [pair for _, attributes in page.tags for pair in attributes.items()]
    sources = [value for name, value in named if name in ("src", "srcset", "href")]
    assert len(sources) == 2 * (len(PANELS) + 1) + 1  # sources are drawn too; light and dark, and the icon
    assert all(source.startswith("data:") for source in sources)
    assert not any(word in page.source for word in ("url(", "@import"))
    for source in sources[1:]:
        picture = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode()
        assert not any(word in picture for word in ("<script", "<b>bold"))


def test_text_of_a_model_is_escaped(hostile_page):
    page = Page(hostile_page)
    allowed = "html head meta link title style body header h1 h2 h3 p div table thead tbody tr th td span br b figure "
    allowed += "picture source img figcaption section pre footer details summary code"
    assert {tag for tag, _ in page.tags} <= {*allowed.split()}
    assert len(page.all("style")) == 1
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert len(page.all("details")) == 2  # of each run the one group that was kept as text
    assert "_a$\\frac$ <b>bold" in page.text
    assert f"note {HOSTILE[:30]} ... {HOSTILE[-30:]}" in page.text


def test_invisible_characters_are_escaped(tmp_path):
    run = write_state(tmp_path / os.fsdecode(b"not-utf8-\xff"), [plain(1)])
    hostile = "\x00\x1b[2J\u202eright to left\x9b\tand\nso on"
    write_completions(run, 1, [{"completion": hostile, "right": 1.0}])
    text = text_of(run)
    assert "\\x00\\x1b[2J\\u202eright to left\\x9b\tand\nso on" in text
    assert "not-utf8-\\udcff" in text


def test_the_middle_of_a_long_completion_is_left_out(run):
    completion = "begin" + "x" * (MAX_CHARACTERS + 1234 - 8) + "end"
    write_completions(run, 1, [{"completion": completion, "right": 1.0}])
    page = Page(write_report([run]))
    kept = MAX_CHARACTERS // 2
    assert f"{completion[:kept]} [1,234 characters left out] {completion[-kept:]}" in page.text
    assert completion[: kept + 1] not in page.text


def test_the_best_and_the_worst_completion_of_the_first_and_the_last_table_are_shown(run):
    for step in (1, 2, 3, 4):
        rows = [
            {"prompt": prompt, "completion": f"{prompt}{step}-{score}", "advantage": score, "right": score}
            for prompt in "abc"
            for score in (0.0, 1.0, 0.5)
        ]
        write_completions(run, step, [{"prompt": "filler", "completion": f"filler{step}", "right": None}, *rows])
    newest = run / "completions" / "completions_00004.parquet"
    newest.write_bytes(newest.read_bytes()[:100])  # killed here
    text = text_of(run)
    shown = [f"{prompt}{step}-{score}" for step in (1, 3) for prompt in "ab" for score in ("1.0", "0.0")]
    assert [word for word in text.split() if word.endswith(("-1.0", "-0.5", "-0.0"))] == shown
    assert "filler" not in text
    assert "completions/completions_00004.parquet cannot be read and is left out." in text


def test_the_summary_of_another_program_is_ignored(run):
    ours = {"metrics": {"avg@4": {"mean": 0.5, "low": 0.4, "high": 0.6}}}
    for name, summary in (("ours", ours), ("theirs", [1])):
        (run / name).mkdir()
        (run / name / "summary.json").write_text(json.dumps(summary))
    text = text_of(run)
    assert "avg@4 50.0% [40.0%, 60.0%]" in text
    assert "theirs" not in text


def test_outcomes_count_groups_and_tokens_by_reason():
    rows = [group(0, "a", 0, "all_wrong", tokens=70), group(0, "b", 2, tokens=10)]
    rows += [group(0, "c", 4, "all_correct", tokens=10), group(1, "d", 0, "all_wrong", tokens=10)]
    figures = summarize_groups(ledger_of(*rows))
    assert figures.num_groups == 4
    found = {row["outcome"]: (row["num_groups"], row["share"], row["tokens"]) for row in figures.outcomes}
    dropped = {"dropped: all_wrong": (2, 0.5, 0.8), "dropped: all_correct": (1, 0.25, 0.1)}
    assert found == {**dropped, "trained": (1, 0.25, 0.1)}


def test_a_carried_group_counts_as_trained_once_there_is_a_next_rollout():
    """As in the summary of the run: group "b" trains in rollout 1, and "d" has not trained yet."""
    carried = {"outcome": "carried"}
    rows = [group(0, "a", 2), group(0, "b", 2, **carried), group(1, "c", 2), group(1, "d", 2, **carried)]
    found = {row["outcome"]: row["num_groups"] for row in summarize_groups(ledger_of(*rows)).outcomes}
    assert found == {"trained": 3, "carried to the next rollout, not trained yet": 1}


def test_a_partial_group_is_neither_accepted_nor_dropped():
    """The rewards of its first completions differed, but the batch was full before the rest was sampled."""
    partial = {"outcome": "partial", "scored": 2, "tokens": 10, "source": "aime", "rewards/right": [1.0, 0.0]}
    rows = [group(0, "a", 2, source="aime"), group(0, "b", 0, "all_wrong", source="aime"), group(0, "c", 1, **partial)]
    figures = summarize_groups(ledger_of(*rows))
    found = {row["outcome"]: (row["num_groups"], row["tokens"]) for row in figures.outcomes}
    partly = "partial: only the first completions were sampled"
    assert found == {"trained": (1, 0.4), "dropped: all_wrong": (1, 0.4), partly: (1, 0.2)}
    (source,) = figures.sources
    assert (source["source"], source["num_groups"], source["all"], source["last"]) == ("aime", 2, 0.5, 0.5)
    assert source["correct"] == 3 / 10  # of all completions that were scored
    assert figures.by_source == {"aime": ([1], [0.5])}


def test_generated_tokens_per_trained_token_weighs_means_by_their_number_of_rollouts(tmp_path):
    """Three rollouts have 1,000 tokens for 400, and one 600 for 600: 3,600 for 1,800, not 1,600 for 1,000."""
    many = {"dynamic_sampling/tokens_generated": 1000.0, "dynamic_sampling/tokens_trained": 400.0, "rollouts": 3.0}
    one = {"dynamic_sampling/tokens_generated": 600.0, "dynamic_sampling/tokens_trained": 600.0}
    page = Page(write_report([write_state(tmp_path / "run", [entry(3, **many), entry(4, **one)])]))
    assert "2.00" in [cell.strip() for cell in page.cells]


def test_acceptance_by_source_in_the_first_fifth_the_last_fifth_and_the_whole_run():
    # "a" is accepted in the first 5 of 10 rollouts, "b" never.
    rows = [group(i, "x", 1 if i < 5 else 0, None if i < 5 else "all_wrong", source="a") for i in range(10)]
    rows += [group(i, "y", 4, "all_correct", source="b") for i in range(9)]
    figures = summarize_groups(ledger_of(*sorted(rows, key=lambda row: row["rollout"])))
    a, b = figures.sources
    assert (a["source"], a["num_groups"], a["first"], a["last"], a["all"]) == ("a", 10, 1.0, 0.0, 0.5)
    assert a["correct"] == 5 / 40
    assert (b["source"], b["num_groups"], b["first"], b["last"], b["all"], b["correct"]) == ("b", 9, 0, 0, 0, 1.0)
    assert figures.by_source["a"] == (list(range(1, 11)), [1.0] * 5 + [0.0] * 5)


def test_prompts_are_shown_with_only_their_id_if_it_is_unique():
    one, two, three = "1 #" + "a" * 16, "sums #" + "b" * 16, "sums #" + "c" * 16
    text = {"prompt": "1+1", "completions": ["2"] * 4}
    figures = summarize_groups(
        ledger_of(group(0, one, 1, **text), group(0, two, 0, "all_wrong", **text), group(1, three, 2, **text))
    )
    assert [prompt["prompt_id"] for prompt in figures.hardest] == [two, "1", three]
    assert [opened["prompt_id"] for opened in figures.opened] == [two, "1", three]


def test_hardest_and_easiest_prompts_are_those_with_most_evidence():
    rows = [group(0, "never, once", 0), group(0, "always, once", 4), group(0, "half", 2)]
    rows += [group(i, "never, twice", 0) for i in range(2)] + [group(i, "always, twice", 4) for i in range(2)]
    rows += [group(2, "unknown", None)]
    figures = summarize_groups(ledger_of(*rows))
    assert [prompt["prompt_id"] for prompt in figures.hardest] == ["never, twice", "never, once", "half"]
    assert [prompt["prompt_id"] for prompt in figures.easiest] == ["always, twice", "always, once", "half"]
    first = figures.hardest[0]
    assert (first["correct"], first["scored"], first["num_groups"], first["step"]) == (0, 8, 2, 2)


def test_the_last_groups_of_each_verdict_are_shown_with_a_completion_of_each_reward():
    texts = {"prompt": "2+2", "completions": ["5", "4", "six", "4 "], "truncated": [False, False, True, False]}
    rewards = {"rewards/right": [0.0, 1.0, 0.0, 1.0], "rewards/form": [None, 0.5, 0.0, 0.5]}
    rows = [group(i, f"p{i}", 2, **texts, **rewards) for i in range(5)]
    rows += [group(5, "q", 0, "all_wrong", **texts, **rewards), group(6, "r", 0, "masked", **rewards)]
    opened = summarize_groups(ledger_of(*rows)).opened
    accepted = [("accepted", f"p{i}") for i in (2, 3, 4)]
    assert [(row["verdict"], row["prompt_id"]) for row in opened] == [("dropped: all_wrong", "q"), *accepted]
    first, second, third = opened[0]["completions"]
    assert (first["number"], first["text"], first["rewards"]) == (1, "5", {"right": 0.0, "form": None})
    assert (second["number"], second["text"], second["rewards"]) == (2, "4", {"right": 1.0, "form": 0.5})
    assert (third["number"], third["text"], third["truncated"]) == (3, "six", True)
    assert opened[0]["num_completions"] == 4


def test_evaluations_are_ordered_by_time_and_compared_with_the_first_on_the_same_problems(run):
    write_summary(run / "a_after", [4, 2, 4], written=300)
    write_summary(run / "other", [1, 2], written=200)
    # Copied later, but made before all others.
    write_summary(run / "z_before", [1, 2, 3], written=400, finished="1970-01-01T00:00:09+00:00")
    loaded = load_run(run)
    assert list(loaded.evaluations) == ["z_before", "other", "a_after"]
    (change,) = loaded.changes
    assert (change["before"], change["after"]) == ("z_before", "a_after")
    # 6 of 12 and 10 of 12; problems gain 3/4, 0 and 1/4.
    cells = Page(write_report([run])).cells
    start = cells.index("z_before \u2192 a_after, avg@4")
    assert cells[start + 1 : start + 3] == ["50.0%", "83.3%"]
    assert cells[start + 3].startswith("+33.3 [")
    assert cells[start + 4].startswith("3\n2 better, 0 worse")


def test_runs_of_the_same_name_get_the_names_of_their_parents_and_are_read_once(tmp_path):
    folders = [write_state(tmp_path / name, [plain(1)]) for name in ("x/lr/run", "y/lr/run")]
    again = tmp_path / "x" / "." / "lr" / "run"
    assert [run.label for run in load_runs([*folders, again])] == ["x/lr/run", "y/lr/run"]
    assert [run.label for run in load_runs(folders[:1])] == ["run"]


def test_more_runs_than_colours_are_refused(tmp_path):
    folders = [write_state(tmp_path / str(i), [plain(1)]) for i in range(len(RUN_COLOURS) + 1)]
    with pytest.raises(ValueError, match="at most 6 runs, because that is the number of colours, got 7"):
        write_report(folders)


def test_report_prints_the_path_of_the_page(tmp_path, capsys):
    runs = [write_state(tmp_path / name, [plain(1)]) for name in ("one", "two")]
    assert main(["report", *map(str, runs), "--output_dir", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page' / 'report.html'}\n"
    assert "2 runs compared" in Page(tmp_path / "page" / "report.html").text


@pytest.mark.parametrize("log", ["[]", '{"log_history": []}', '{"log_history": [{"reward": 1}]}', "\xff", None])
def test_a_folder_without_a_log_is_refused_in_one_line(tmp_path, capsys, log):
    if log is not None:
        (tmp_path / "trainer_state.json").write_text(log, encoding="latin-1")
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trl-dapo report: `{tmp_path}` contains no log: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "report").exists()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium with a window of 1000 pixels."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("Debian's packages chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("headless", "no-sandbox", "disable-gpu", "window-size=1000,900", f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as browser:
        yield browser


def test_a_browser_shows_the_page_whole_and_runs_nothing_in_it(browser, hostile_page):
    browser.get(hostile_page.as_uri())
    widths = browser.execute_script("return [...document.images].map(i => i.complete && i.naturalWidth)")
    assert len(widths) == len(PANELS) + 1
    assert all(width > 0 for width in widths)
    assert browser.title == "_a$\\frac$ <b>bold, second - trl-dapo report"
    assert browser.execute_script("return document.querySelectorAll('script, [onerror], a').length") == 0
    assert HOSTILE in browser.execute_script("return document.body.innerText")
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1000
