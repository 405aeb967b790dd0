# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Nothing is asked for twice, whatever ended the evaluation before, and nothing is mixed."""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from evaluations import ask, asked, here, mixed_prompts, sums
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_dapo import evaluation
from trl_dapo.evaluation import evaluate
from trl_dapo.evaluation.jobs import GeneratedCompletion, Journal


KILLED = """
import sys
from trl_dapo.evaluation import evaluate
evaluate("tiny", sys.argv[1], sys.argv[2], base_url=sys.argv[3], k=8, concurrency=3, progress=False)
"""


def test_a_killed_evaluation_continues_without_asking_for_anything_twice(serve, tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"1+{i}", "answer": str(1 + i)}) + "\n" for i in range(6)))
    answers, lock = [], threading.Lock()
    withheld, is_over = threading.Semaphore(0), threading.Event()

    def text(body):
        return f"Answer: {body['seed'] % 5}"

    def answers_ten_and_no_more(body):
        with lock:
            if len(answers) < 10:
                answers.append(asked(body))
                return text(body)
        withheld.release()
        is_over.wait()

    command = [sys.executable, "-c", KILLED, str(problems), str(tmp_path / "run"), serve(answers_ten_and_no_more).url]
    environment = {**os.environ, "PYTHONPATH": str(Path(evaluation.__file__).parents[2])}
    with subprocess.Popen(command, env=environment) as process:
        # No thread asks before its last answer is on disk: once all three wait, all ten are.
        for _ in range(3):
            assert withheld.acquire(timeout=60)
        process.kill()
    is_over.set()
    assert process.returncode < 0
    again, unbroken = serve(text), serve(text)
    settings = {"k": 8, "concurrency": 3}
    continued = ask(again, problems, tmp_path / "run", **settings)
    assert len(again.requests) == 48 - 10
    assert len(set(again.asked) | set(answers)) == 48
    assert continued == ask(unbroken, problems, tmp_path / "unbroken", **settings)
    assert len(unbroken.requests) == 48
    assert 0 < continued["metrics"]["avg@8"]["mean"] < 1


def test_more_completions_of_each_problem_continue_a_finished_evaluation(serve, tmp_path):
    server = serve(lambda body: f"Answer: {2 + body['seed'] % 2}")
    ask(server, sums(3), tmp_path / "raised", k=2)
    raised = ask(server, sums(3), tmp_path / "raised", k=8)
    assert len(server.requests) == len(set(server.asked)) == 3 * 8
    assert raised == ask(server, sums(3), tmp_path / "at once", k=8)
    assert 0 < raised["metrics"]["avg@8"]["mean"] < 1
    # fewer are among those that are there
    assert ask(server, sums(3), tmp_path / "raised", k=2)["problems"][0]["num_completions"] == 2
    assert len(server.requests) == 2 * 24


def test_more_problems_continue_a_finished_evaluation(serve, tmp_path, problems_file):
    server = serve(lambda body: "Answer: 2")
    first = ask(server, problems_file, tmp_path / "run", limit=1)
    both = ask(server, problems_file, tmp_path / "run")
    assert len(server.requests) == len(set(server.asked)) == 2 * 4
    assert (first["num_problems"], both["num_problems"]) == (1, 2)
    assert ask(server, problems_file, tmp_path / "run", limit=1) == first
    assert len(server.requests) == 2 * 4


def test_a_row_without_a_gold_answer_can_be_skipped_when_an_evaluation_continues(serve, tmp_path, problems_file):
    server = serve(lambda body: "Answer: 2")
    first = ask(server, problems_file, tmp_path / "run")
    with open(problems_file, "a") as file:
        file.write('{"problem": "Show that 2 is even.", "answer": "proof"}\n')
    with pytest.raises(ValueError, match=r"line 3, .*`answer` is 'proof'"):
        ask(server, problems_file, tmp_path / "run")
    assert ask(server, problems_file, tmp_path / "run", on_bad_rows="skip")["metrics"] == first["metrics"]
    assert len(server.requests) == 2 * 4


def test_a_summary_with_another_scorer_is_replaced_with_a_warning(serve, tmp_path, caplog):
    server = serve(lambda body: "Answer: 2")
    for _ in range(2):
        ask(server, sums(2), tmp_path)
    assert "is replaced" not in caplog.text
    ask(server, sums(2), tmp_path, scorer="last_number")
    assert (
        f"{tmp_path / 'summary.json'} is replaced: it was written with other settings (`scorer` 'dapo_math' -> "
        "'last_number'). To keep both summaries, use another `output_dir`."
    ) in caplog.text


def test_the_folder_of_a_training_run_is_refused_but_not_a_folder_in_it(serve, tmp_path):
    (tmp_path / "log_history.jsonl").write_text("{}\n")
    server = serve(lambda body: "Answer: 2")
    with pytest.raises(ValueError, match=r"is the folder of a training run: it contains `log_history\.jsonl`\. "):
        ask(server, sums(1), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log_history.jsonl"]
    assert ask(server, sums(1), tmp_path / "eval")["num_problems"] == 1


@contextmanager
def calling_at_the_end(function, every):
    yield
    function()


def test_in_a_file_the_progress_is_lines_and_not_a_bar(serve, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("trl_dapo.evaluation.run.calling", calling_at_the_end)
    ask(serve(lambda body: "Answer: 2"), sums(2), tmp_path, k=4, progress=True)
    assert capfd.readouterr().err == "Sampling 8 completions.\n8 of 8 completions.\n"


@pytest.mark.parametrize("torn", [1, 20])
def test_the_completion_of_an_incomplete_last_line_is_sampled_again(serve, tmp_path, torn):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(1), tmp_path, concurrency=1)
    journal = tmp_path / "completions.jsonl"
    content = journal.read_bytes()
    journal.write_bytes(content[:-torn])
    ask(server, sums(1), tmp_path)
    assert len(server.requests) == 5
    assert server.asked[4] == server.asked[3]
    assert journal.read_bytes() == content


def test_an_evaluation_killed_at_its_first_line_starts_over(serve, tmp_path):
    (tmp_path / "completions.jsonl").write_text('{"settings": {"mod')
    assert ask(serve(lambda body: "Answer: 2"), sums(1), tmp_path)["num_problems"] == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": 0.6}, "`temperature` was 1.0 and is now 0.6"),
        ({"max_completion_length": 10}, "`max_completion_length` was 20480 and is now 10"),
        (
            {"dataset": sums(2).select([1])},
            "contains completions of 1 other problems, .*the first of which has .* 'id2'",
        ),
        ({"dataset": sums(1, prompt=["2+0"])}, "contains completions of 1 other problems"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_with_both_values(serve, tmp_path, changed, message):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(1), tmp_path)
    with pytest.raises(ValueError, match=message + ".*Use another `output_dir`"):
        ask(server, **{"dataset": sums(1), "output_dir": tmp_path, **changed})
    assert len(server.requests) == 4


def test_another_training_of_the_same_name_is_refused(serve, tmp_path, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    settings = {"base_url": serve(lambda body: "Answer: 2").url, "k": 1, "progress": False}
    model.save_pretrained(tmp_path / "trained")
    evaluate(tmp_path / "trained", sums(1), tmp_path / "eval", **settings)
    with torch.no_grad():
        model.lm_head.weight += 1e-3
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(ValueError, match=r"`weights` was '[0-9a-f]{16}' and is now"):
        evaluate(tmp_path / "trained", sums(1), tmp_path / "eval", **settings)


def test_two_evaluations_do_not_write_to_one_folder(tmp_path):
    path = tmp_path / "completions.jsonl"
    with Journal(path, {}) as journal:
        journal.append("a", 0, GeneratedCompletion("text", 1, False))
        with pytest.raises(BlockingIOError, match=f"Another evaluation is writing to `{tmp_path}`"):
            Journal(path, {})
    with Journal(path, {}) as journal:
        assert journal.completions == {("a", 0): GeneratedCompletion("text", 1, False)}


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ('{"settings": null}', 1),
        ('{"problem": "a", "index": 0, "text": "t"}', 2),
        ("\0\0\0", 2),
        ('{"problem": ["a"], "index": 0, "text": "t", "length": 1, "truncated": false}', 2),
        ('{"problem": "a", "index": 0, "text": 5, "length": 1, "truncated": false}', 2),
    ],
)
def test_the_error_for_a_damaged_line_of_a_journal_names_it(tmp_path, line, number):
    path = tmp_path / "completions.jsonl"
    path.write_text(line + "\n" if number == 1 else '{"settings": {}}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"Line {number} of .* which was not written by an evaluation"):
        Journal(path, {})


def saved(folder, model, template, end="<eos>"):
    """A copy of a model with another chat template, or another token that ends a completion."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.eos_token = end
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_completions_of_another_chat_template_or_end_token_are_not_scored_again(tiny_model, tmp_path):
    """Completions depend on these settings. If one of them changes, stored completions must not be used."""
    template = AutoTokenizer.from_pretrained(tiny_model).chat_template
    model = saved(tmp_path / "model", tiny_model, template)
    here(model, mixed_prompts(1), tmp_path / "out", k=1)
    saved(tmp_path / "model", tiny_model, template + "Think.")
    with pytest.raises(
        ValueError,
        match=r"contains completions that were sampled with other settings: `chat_template` was '\w{16}' and is now",
    ):
        here(model, mixed_prompts(1), tmp_path / "out", k=1)
    here(model, sums(1), tmp_path / "plain", k=1)
    saved(tmp_path / "model", tiny_model, template + "More.")
    here(model, sums(1), tmp_path / "plain", k=2)  # around text no template goes
    saved(tmp_path / "model", tiny_model, template, end=".")
    with pytest.raises(ValueError, match=r"`eos_token_id` was \[\d+\] and is now \[\d+, \d+\]"):
        here(model, sums(1), tmp_path / "plain", k=2)
    kept = saved(tmp_path / "kept", tiny_model, template)
    here(kept, mixed_prompts(1), tmp_path / "kwargs", k=1)
    with pytest.raises(ValueError, match=r"`chat_template_kwargs` was None and is now \{'a': 1\}"):
        here(kept, mixed_prompts(1), tmp_path / "kwargs", k=1, chat_template_kwargs={"a": 1})


@pytest.mark.parametrize("changed", ["tokenizer", "config"])
def test_completions_of_another_tokenizer_or_config_are_not_scored_again(tiny_model, tmp_path, changed):
    model = saved(tmp_path / "model", tiny_model, None)
    here(model, sums(1), tmp_path / "out", k=1)
    if changed == "tokenizer":  # which puts a token before every text
        tokenizer = AutoTokenizer.from_pretrained(model)
        begin = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", tokenizer.eos_token_id)])
        tokenizer.backend_tokenizer.post_processor = begin
        tokenizer.save_pretrained(model)
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    name = {"tokenizer": "tokens_of_a_text", "config": "config"}[changed]
    with pytest.raises(ValueError, match=f"contains completions that were sampled with other settings: `{name}` was "):
        here(model, sums(1), tmp_path / "out", k=1)


def test_a_scorer_that_fails_loses_nothing_of_the_batch_that_was_sampled(tiny_model, tmp_path):
    def fails(completions, **kwargs):
        raise KeyError("letter")

    with pytest.raises(ValueError, match="The scorer 'fails' failed"):
        here(tiny_model, sums(4), tmp_path, k=2, scorer=fails, batch_size=8)
    assert len((tmp_path / "completions.jsonl").read_text().splitlines()) == 1 + 8


def test_a_prompt_without_any_token_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="A prompt is empty, and the tokenizer adds no token to it"):
        here(tiny_model, Dataset.from_dict({"prompt": ["", "1+1"], "solution": ["1", "2"]}), tmp_path, k=1)


def test_completions_of_an_adapters_other_base_are_not_scored_again(tiny_model, tmp_path):
    base = saved(tmp_path / "base", tiny_model, None)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules="all-linear"))
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    here(tmp_path / "adapter", sums(1), tmp_path / "out", k=1)
    changed = AutoModelForCausalLM.from_pretrained(base)
    torch.nn.init.normal_(changed.lm_head.weight)
    changed.save_pretrained(base)
    with pytest.raises(ValueError, match=r"other settings: `base_weights` was '\w{16}' and is now '\w{16}'"):
        here(tmp_path / "adapter", sums(1), tmp_path / "out", k=1)
