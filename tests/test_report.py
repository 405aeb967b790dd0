# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import base64
import io
import json
import os
import shutil
from html.parser import HTMLParser

import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from trl_dapo.cli import main
from trl_dapo.report import PANELS, load_log_history, load_run, load_runs, plot_run, series, write_report
from trl_dapo.report.page import MAX_CHARACTERS
from trl_dapo.report.panels import OUTCOMES, PAPER, RUN_COLOURS, TIMELINE, plot_panel, smooth, thin


PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    '</pre><style>body{display:none}</style><a href="javascript:void(0)">\'"&amp;'
)


OVERLAP = {"sampling": 6.0, "idle": 4.0, "update": 5.0, "wait": 3.0, "rewards": 2.0}


def entry(step: int, **metrics) -> dict:
    """What DAPOTrainer logs of one step in which 6 of 16 groups were accepted."""
    sampling = {"groups_generated": 16.0, "acceptance_rate": 6 / 16, "rounds": 2.0}
    sampling |= {"dropped/all_correct": 7.0, "dropped/all_wrong": 3.0, "dropped/masked": 0.0}
    sampling |= {"tokens_generated": 800.0, "tokens_trained": 320.0}
    return {
        "step": step,
        "reward": 0.1 * step,
        "filtered_reward": 0.1 * step + 0.05,
        "entropy": 1.0 / step,
        "grad_norm": 0.5,
        "microbatches": 4.0,
        "peak_microbatch_tokens": 9216.0,
        **{f"clip_ratio/{name}": 0.01 for name in ("low_mean", "high_mean", "dual_mean")},
        **{f"completions/{name}": 8.0 for name in ("mean_length", "max_length")},
        "completions/clipped_ratio": 0.25,
        **{f"dynamic_sampling/{name}": value for name, value in sampling.items()},
        **{f"overlap/{name}_seconds": value for name, value in OVERLAP.items()},
        **metrics,
    }


def plain(step: int) -> dict:
    """As little as a log can hold: one picture is drawn quickly."""
    return {"step": step, "reward": 0.1 * step}


def write_state(folder, log_history: list[dict], max_steps: int = 100):
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": log_history[-1]["step"], "max_steps": max_steps, "log_history": log_history}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def write_completions(run, step: int, rows: list[dict]):
    (run / "completions").mkdir(exist_ok=True)
    with (run / "completions" / f"completions_{step:05d}.parquet").open("wb") as file:
        pd.DataFrame([{"step": step, **row} for row in rows]).to_parquet(file)


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text = [], ""
        self.source = path.read_text("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def hostile_runs(tmp_path_factory):
    """Two runs with everything that can be logged; what the model, the rewards and the folders say is hostile."""
    root = tmp_path_factory.mktemp("runs")
    runs = [root / "_a$\\frac$ <b>bold", root / "second"]
    for run, reward in zip(runs, (0.12, 0.1), strict=True):
        history = [entry(step, reward=reward * step, entropy=10 * reward / step) for step in range(1, 41)]
        history += [{"step": 40, "eval_avg@4": 0.625, "eval_pass@4": 0.75}]
        write_state(run, [*history, {"step": 40, "train_runtime": 12.0}], max_steps=40)
        (run / "eval_final").mkdir()
        estimate = {"mean": 0.646, "low": 0.622, "high": 0.669}
        (run / "eval_final" / "summary.json").write_text(json.dumps({"metrics": {"avg@4": estimate}}))
        rows = [
            {"completion": HOSTILE, "advantage": 1.5, "right": 1.0, "note": HOSTILE},
            {
                "completion": "\x00\x1b[2J\u202eright to left\n" + "\n" * 900,
                "advantage": 0.2,
                "right": 0.5,
                "note": None,
            },
            {"completion": "w" * 100_000, "advantage": -1.5, "right": 0.0, "note": "\x07"},
        ]
        write_completions(run, 40, [{"prompt": [{"role": "user", "content": f"{HOSTILE} prompt"}], **r} for r in rows])
    return runs


@pytest.fixture(scope="module")
def hostile_page(hostile_runs, tmp_path_factory):
    return write_report(hostile_runs, tmp_path_factory.mktemp("report"))


# ---- Logs ----


def test_a_running_mean_starts_with_what_there_is():
    assert smooth([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


def test_a_long_line_is_thinned_evenly_and_ends_where_the_run_does():
    assert thin(list(range(600))) == list(range(600))
    assert thin(list(range(1201))) == list(range(0, 1201, 3))
    assert thin(list(range(1200))) == list(range(1, 1200, 2))


def test_entries_without_the_metric_or_without_a_number_are_left_out():
    values = [0.5, None, float("nan"), float("-inf"), "0.5", 10**400]
    history = [{"step": step, "reward": value} for step, value in enumerate(values)]
    assert series([*history, {"step": 9}], "reward") == ([0], [0.5])


def test_the_newest_complete_state_of_a_run_is_read_and_half_written_ones_are_noted(tmp_path):
    for step in (2, 10):
        write_state(tmp_path / f"checkpoint-{step}", [{"step": step, "reward": 0.0}])
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"global_step": 12, "log_hi')  # killed here
    (tmp_path / "checkpoint-14").mkdir()  # or here
    run = load_run(tmp_path)
    assert run.log_history == load_log_history(tmp_path) == [{"step": 10, "reward": 0.0}]
    assert run.notes == [
        "checkpoint-12/trainer_state.json is incomplete: the checkpoint is passed over.",
        "checkpoint-14/trainer_state.json is missing: the checkpoint is passed over.",
    ]


def test_the_growing_log_is_read_up_to_where_the_run_was_killed(tmp_path):
    write_state(tmp_path / "checkpoint-2", [{"step": 2, "reward": 0.2}])
    lines = [json.dumps({"step": step, "reward": 0.1, "max_steps": 9}) for step in (1, 2, 3)]
    (tmp_path / "log_history.jsonl").write_bytes("\n".join([*lines, '{"step": 4, "rew\u00e9']).encode()[:-1])
    run = load_run(tmp_path)
    assert [(entry["step"], entry["reward"]) for entry in run.log_history] == [(1, 0.1), (2, 0.1), (3, 0.1)]
    assert (run.last_step, run.max_steps, run.finished) == (3, 9, False)
    assert run.notes == ["log_history.jsonl: 1 of 4 lines are incomplete and left out."]


def test_a_run_that_has_not_logged_yet_shows_its_folders_newest_checkpoint_and_says_so(tmp_path):
    write_state(tmp_path / "checkpoint-2", [{"step": 2, "reward": 0.2}])
    (tmp_path / "log_history.jsonl").write_text("")
    run = load_run(tmp_path)
    assert run.log_history == [{"step": 2, "reward": 0.2}]
    assert run.notes == ["log_history.jsonl holds no entry yet: what is shown is the newest checkpoint's."]


@pytest.mark.parametrize(
    ("log_history", "state"),
    [
        ([plain(40)], "not finished: going on or stopped at step 40 of 100"),
        ([plain(100)], "finished, step 100"),
        (
            [plain(40), {"step": 40, "train_runtime": 9.0}, {"step": 40, "eval_reward": 0.1}],
            "finished early, at step 40",
        ),
        ([{"step": 40, "train_runtime": 9.0}, plain(41)], "not finished: going on or stopped at step 41"),  # extended
    ],
    ids=["going on", "finished", "stopped early", "extended"],
)
def test_the_table_says_how_far_a_run_came(tmp_path, log_history, state):
    page = Page(write_report([write_state(tmp_path / "run", log_history)]))
    assert state in page.text


# ---- The page ----


def test_the_figures_in_the_table_are_the_logs(tmp_path):
    history = [entry(1), entry(2, **{"eval_avg@32": 0.125})]
    history[0]["dynamic_sampling/tokens_generated"] = 480.0
    text = Page(write_report([write_state(tmp_path / "run", history)])).text
    assert "0.200" in text  # reward of the last step
    assert "0.250" in text  # after the filter
    assert "38%" in text  # 6 of 16 groups accepted
    assert "2.00" in text  # (480 + 800) / (320 + 320) tokens
    assert "12.5%\navg@32 at step 2" in text


def test_groups_are_split_into_accepted_and_the_reasons_that_occurred():
    shares = OUTCOMES.find([entry(1), entry(2, **{"dynamic_sampling/groups_generated": 0.0})])
    assert shares == {"accepted": ([1], [6 / 16]), "all_correct": ([1], [7 / 16]), "all_wrong": ([1], [3 / 16])}


def test_the_reasons_of_a_users_own_rule_are_drawn_too(tmp_path):
    log_history = [entry(step, **{"dynamic_sampling/dropped/too easy": 2.0}) for step in (1, 2)]
    assert OUTCOMES.find(log_history)["too easy"] == ([1, 2], [2 / 16] * 2)
    assert OUTCOMES.find(log_history)["accepted"] == ([1, 2], [4 / 16] * 2)


def test_the_timeline_lays_the_servers_time_above_the_trainers_for_the_last_eight_rollouts():
    figure = plot_panel(TIMELINE, [[entry(step) for step in range(1, 11)]], [""])
    (axes,) = figure.axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    # The server samples for 6 s and idles for 4; the trainer updates for 5, waits for 3 and scores for 2.
    assert bars == [(0, 6), (6, 4), (0, 5), (5, 3), (8, 2)] * 8
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(step) for step in range(3, 11)]
    heights = [bar.get_y() for bar in axes.patches[:5]]
    assert max(heights[:2]) < min(heights[2:])
    assert axes.yaxis_inverted()


def test_panels_without_data_are_left_out_and_named(tmp_path):
    path = write_report([write_state(tmp_path / "run", [plain(1), plain(2)])])
    page = Page(path)
    others = [panel.title for panel in PANELS if panel.name != "reward"]
    assert f"Left out, since nothing was logged: {', '.join(others)}." in page.text
    assert [figure["id"] for figure in page.all("figure")] == ["reward"]
    assert sorted(os.listdir(path.parent)) == ["overview.png", "report.html", "reward.png"]
    assert (path.parent / "reward.png").read_bytes()[:8] == PNG
    assert (path.parent / "overview.png").read_bytes()[:8] == PNG


def test_every_picture_says_in_words_what_it_shows(hostile_page):
    page = Page(hostile_page)
    images = {figure["id"]: image for figure, image in zip(page.all("figure"), page.all("img"), strict=True)}
    assert list(images) == [panel.name for panel in PANELS]
    assert len(page.all("figcaption")) == len(PANELS)
    # A twentieth of 40 steps is 2: (0.1 + 0.2) / 2 ... (3.9 + 4.0) / 2.
    assert (
        "second, all that was sampled: 0.1 at step 1, 3.95 at step 40, between 0.1 and 3.95."
        in images["reward"]["alt"]
    )


def test_the_page_stands_alone(hostile_page):
    page = Page(hostile_page)
    sources = [
        value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "srcset", "href")
    ]
    assert len(sources) == 2 * len(PANELS) + 1  # light and dark, and the icon
    assert all(source.startswith("data:") for source in sources)
    assert "url(" not in page.source
    assert "@import" not in page.source
    for source in sources[1:]:
        picture = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode()
        assert "<script" not in picture
        assert "<b>bold" not in picture


def test_what_a_model_wrote_is_shown_and_never_obeyed(hostile_page):
    page = Page(hostile_page)
    allowed = "html head meta link title style body header h1 h2 h3 p div table thead tbody tr th td span br figure"
    assert {tag for tag, _ in page.tags} <= {*f"{allowed} picture source img figcaption section pre footer".split()}
    assert len(page.all("style")) == 1
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) == 2 * 2  # prompt and completion of each run
    assert "_a$\\frac$ <b>bold" in page.text
    assert f"note {HOSTILE[:30]} ... {HOSTILE[-30:]}" in page.text


def test_characters_that_do_not_show_stand_as_escapes(tmp_path):
    run = write_state(tmp_path / os.fsdecode(b"not-utf8-\xff"), [plain(1)])
    hostile = "\x00\x1b[2J\u202eright to left\x9b\tand\nso on"
    write_completions(run, 1, [{"prompt": "p", "completion": hostile, "advantage": 0.0, "right": 1.0}])
    text = Page(write_report([run])).text
    assert "\\x00\\x1b[2J\\u202eright to left\\x9b\tand\nso on" in text
    assert "not-utf8-\\udcff" in text


def test_a_long_completion_keeps_both_ends_and_says_how_much_is_gone(tmp_path):
    run = write_state(tmp_path, [plain(1)])
    completion = "begin" + "x" * (MAX_CHARACTERS + 1234 - 8) + "end"
    write_completions(run, 1, [{"prompt": "p", "completion": completion, "advantage": 0.0, "right": 1.0}])
    page = Page(write_report([run]))
    kept = MAX_CHARACTERS // 2
    assert f"{completion[:kept]} [1,234 characters left out] {completion[-kept:]}" in page.text
    assert completion[: kept + 1] not in page.text


def test_the_best_and_the_worst_completion_of_the_first_and_the_last_table_are_shown(tmp_path):
    run = write_state(tmp_path, [plain(1)])
    for step in (1, 2, 3, 4):
        rows = [
            {"prompt": prompt, "completion": f"{prompt}{step}-{score}", "advantage": score, "right": score}
            for prompt in "abc"
            for score in (0.0, 1.0, 0.5)
        ]
        filler = {"prompt": "filler", "completion": f"filler{step}", "advantage": 0.0, "right": None}
        write_completions(run, step, [filler, *rows])
    newest = run / "completions" / "completions_00004.parquet"
    newest.write_bytes(newest.read_bytes()[:100])  # killed here
    text = Page(write_report([run])).text
    shown = [f"{prompt}{step}-{score}" for step in (1, 3) for prompt in "ab" for score in ("1.0", "0.0")]
    assert [word for word in text.split() if word.endswith(("-1.0", "-0.5", "-0.0"))] == shown
    assert "filler" not in text
    assert "completions/completions_00004.parquet cannot be read and is passed over." in text


def test_a_prompt_whose_completions_are_worth_the_same_is_shown_with_one(tmp_path):
    run = write_state(tmp_path, [plain(1)])
    rows = [{"prompt": "p", "completion": f"c{i}", "advantage": 0.0, "right": 0.0} for i in range(3)]
    write_completions(run, 1, rows)
    text = Page(write_report([run])).text
    assert "One of 3 completions, all worth the same" in text
    assert "c0" in text
    assert "c1" not in text


def test_another_programs_summary_is_no_evaluation(tmp_path):
    run = write_state(tmp_path, [plain(1)])
    for name, summary in {
        "ours": {"metrics": {"avg@4": {"mean": 0.5, "low": 0.4, "high": 0.6}}},
        "theirs": [1],
    }.items():
        (run / name).mkdir()
        (run / name / "summary.json").write_text(json.dumps(summary))
    text = Page(write_report([run])).text
    assert "avg@4\u00a050.0% [40.0%, 60.0%]" in text
    assert "theirs" not in text


def test_the_same_log_gives_the_same_files(tmp_path):
    run = write_state(tmp_path / "run", [plain(1), plain(2)])
    first, second = (write_report([run], tmp_path / name) for name in ("first", "second"))
    for name in os.listdir(first.parent):
        assert (first.parent / name).read_bytes() == (second.parent / name).read_bytes()


def test_a_run_without_some_metrics_is_drawn_all_the_same(tmp_path):
    plot_run([plain(1)], tmp_path / "plots" / "run.png")
    assert (tmp_path / "plots" / "run.png").read_bytes()[:8] == PNG


# ---- Several runs ----


def test_runs_of_the_same_name_are_told_apart_by_their_parents_and_none_is_read_twice(tmp_path):
    folders = [write_state(tmp_path / name, [plain(1)]) for name in ("x/lr/run", "y/lr/run")]
    assert [run.label for run in load_runs([*folders, tmp_path / "x" / "." / "lr" / "run"])] == [
        "x/lr/run",
        "y/lr/run",
    ]
    assert [run.label for run in load_runs(folders[:1])] == ["run"]


def test_more_runs_than_colours_are_refused(tmp_path):
    folders = [write_state(tmp_path / str(i), [plain(1)]) for i in range(len(RUN_COLOURS) + 1)]
    with pytest.raises(ValueError, match="At most 6 runs can be told apart by colour, got 7"):
        write_report(folders)


# ---- The command line ----


def test_report_prints_where_the_page_lies(tmp_path, capsys):
    runs = [write_state(tmp_path / name, [plain(1)]) for name in ("one", "two")]
    assert main(["report", *map(str, runs), "--output_dir", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page' / 'report.html'}\n"
    assert "2 runs compared" in Page(tmp_path / "page" / "report.html").text


@pytest.mark.parametrize("log", ["[]", "{}", '{"log_history": []}', '{"log_history": [{"reward": 1}]}', "\xff", None])
def test_a_folder_without_a_log_is_refused_in_one_line(tmp_path, capsys, log):
    if log is not None:
        (tmp_path / "trainer_state.json").write_text(log, encoding="latin-1")
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trl-dapo report: `{tmp_path}` holds no log: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "report").exists()


# ---- In a browser ----


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a screen, 1000 pixels wide."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("Debian's packages chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    quiet = "disable-background-networking disable-component-update disable-sync no-first-run disable-quic"
    for flag in (*quiet.split(), "headless", "no-sandbox", "disable-gpu", f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.add_argument("--window-size=1000,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as browser:
        yield browser


def share_of_pixels(browser, colour: str) -> float:
    """Share of a screenshot of the whole page that has exactly this colour."""
    size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    pixels = imread(io.BytesIO(base64.b64decode(picture["data"])))[..., :3]
    return (abs(pixels - to_rgb(colour)).max(axis=2) < 1 / 255).mean()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_whole_and_runs_nothing_in_it(browser, hostile_page, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get_log("performance")
    browser.get(hostile_page.as_uri())
    widths = browser.execute_script("return [...document.images].map(i => i.complete && i.naturalWidth)")
    assert len(widths) == len(PANELS)
    assert all(width > 0 for width in widths)
    assert browser.title == "_a$\\frac$ <b>bold, second - trl-dapo report"
    assert browser.execute_script("return document.querySelectorAll('script, [onerror], a').length") == 0
    assert HOSTILE in browser.execute_script("return document.body.innerText")
    assert browser.get_log("browser") == []
    requests = [json.loads(event["message"])["message"] for event in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in requests if event["method"] == "Network.requestWillBeSent"]
    assert {url.partition(":")[0] for url in urls} <= {"file", "data"}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1000
    # Both runs are drawn in their colours, on the paper of the scheme.
    browser.execute_script("document.querySelectorAll('.swatch').forEach(swatch => swatch.remove())")
    assert min(share_of_pixels(browser, colour) for colour in RUN_COLOURS[:2]) > 5e-5
    assert share_of_pixels(browser, PAPER[scheme]) > 0.5
