# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One file, asked and scored by training's evaluation and by `trl-dapo eval`: the same tokens, keywords and scores."""

import copy
import inspect
import json
import sys
from collections import Counter

import pandas as pd
import pytest
import torch
from tiny_models import make_model, make_tokenizer
from transformers import GenerationMixin

from trl_dapo import DAPOTrainer
from trl_dapo.cli.entry_point import main
from trl_dapo.cli.train import make_parser, trainer_arguments
from trl_dapo.rewards import checks


K = 4
JUDGE = '''
"""Reward functions of a user."""

def texts_of(completions):
    return [text if isinstance(text, str) else text[0]["content"] for text in completions]

def exact(completions, solution, **kwargs):
    return [None if gold is None else float(text == str(gold)) for text, gold in zip(texts_of(completions), solution)]

async def exact_later(completions, solution, **kwargs):
    return exact(completions, solution)

def among(completions, golds, log_extra, **kwargs):
    log_extra("among_answer", texts_of(completions))
    golds[0].append("something else")  # of its own copy
    return [float(text in of_row[:1]) for text, of_row in zip(texts_of(completions), golds)]

def graded(completions, **kwargs):
    return [min(len(text), 12) / 12 for text in texts_of(completions)]

def label(completions, label, log_metric, **kwargs):
    log_metric("seen", 1.0)
    return [label_ if len(text) > 8 else 0 for text, label_ in zip(texts_of(completions), label)]

def has_place(completions, prompts, **kwargs):
    """Compare the completions of a group. The last one in alphabetical order is correct."""
    groups = {}
    for prompt, text in zip(map(str, prompts), texts_of(completions)):
        groups.setdefault(prompt, []).append(text)
    return [float(text == max(groups[prompt])) for prompt, text in zip(map(str, prompts), texts_of(completions))]

def counts_tokens(completions, completion_ids, trainer_state, **kwargs):
    return [float(len(ids) > 8 and trainer_state.global_step == 0) for ids in completion_ids]
'''
GOLDS = ["4", "5", "6", "7"]
SAYS = ["4", "Answer: 4", "\\boxed{5}", "7", "so $6$", "Answer: 7"]
CHAT = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}<eos>{% endfor %}<a>"
THINKS = CHAT + "{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}"


def texts(solutions=GOLDS, **columns):
    rows = [{"prompt": f"{i} of {len(solutions)}?", "solution": gold} for i, gold in enumerate(solutions)]
    return [{**row, **{name: values[i] for name, values in columns.items()}} for i, row in enumerate(rows)]


def messages(solutions=GOLDS, system=None, **columns):
    before = [] if system is None else [{"role": "system", "content": system}]
    return [
        {**row, "prompt": [*before, {"role": "user", "content": row["prompt"]}]} for row in texts(solutions, **columns)
    ]


def problems(golds=GOLDS, problem="problem", answer="answer"):
    return [{problem: f"{i} of {len(golds)}?", answer: gold} for i, gold in enumerate(golds)]


def verl(golds=GOLDS):
    return [
        {**row, "reward_model": {"ground_truth": row.pop("solution")}, "data_source": "a set"}
        for row in messages(golds)
    ]


# Rows, the reward, options of both commands, and what else differs: the kind of file, the template, the model.
TABLE = {
    "text": (texts(), "judge.exact", []),
    "text, no template": (texts(), "judge.exact", [], {"template": None}),
    "text, unchanged": (texts(), "judge.exact", ["--prompt_style", "as_is"]),
    "text, unchanged, our reward": (texts(), "last_number", ["--prompt_style", "as_is"]),
    "text in a CSV": (texts(), "judge.exact", [], {"kind": "csv"}),
    "text in JSON": (texts(), "judge.exact", [], {"kind": "json"}),
    "text in parquet": (texts(), "judge.exact", [], {"kind": "parquet"}),
    "messages": (messages(), "judge.exact", []),
    "messages with a system": (messages(["4", "7", "4", "7"], system="Be brief."), "judge.exact", []),
    "messages in parquet": (messages(), "judge.exact", [], {"kind": "parquet"}),
    "messages, thinking off": (
        messages(),
        "judge.exact",
        ["--chat_template_kwargs", '{"enable_thinking": false}'],
        {"template": THINKS},
    ),
    "messages, unchanged, our reward": (messages(), "last_number", ["--prompt_style", "as_is"]),
    "whole numbers": (texts([4, 5, 6, 7]), "judge.exact", []),
    "decimals": (texts([4.0, 0.5, 1e-7, 7.25]), "judge.exact", []),
    "truth values": (texts([True, False, True, False]), "judge.exact", []),
    "a gold that is missing": (texts(["4", None, "6", "7"]), "judge.exact", []),
    "golds in other notations": (texts(["1,234", "so $6$", "\\boxed{5}", '["cow"]']), "judge.exact", []),
    "a list of golds": (texts(golds=[["4"], ["5", "6"], ["7"], [""]]), "judge.among", []),
    "a label next to the solution": (texts(label=[1, 0, 1, 0]), "judge.label", []),
    "an answer next to the solution": (texts(answer=["x", "y", "z", "w"]), "judge.exact", []),
    "numbers and text in one column": (texts(label=[1, 0, 1, 0], level=[1, "two", None, 4.5]), "judge.label", []),
    "a struct": (texts(extra_info=[{"index": i, "raw": None} for i in range(4)]), "judge.exact", []),
    "two rows of one prompt": ([*texts(), *texts()[:1]], "judge.exact", []),
    "one prompt with two golds": ([*texts(), {**texts()[0], "solution": "7"}], "judge.exact", []),
    "ids that repeat": (texts(id=["a", "a", "b", "b"]), "judge.exact", []),
    "sources": (texts(source=["x", "x", "y", "0"], id=["1", "2", "1", "1"]), "judge.exact", []),
    "a reward that is awaited": (texts(), "judge.exact_later", []),
    "partial credit": (texts(), "judge.graded", []),
    "partial credit with a threshold": (texts(), "judge.graded", [], {"threshold": 0.5}),
    "a reward that compares a group": (texts(), "judge.has_place", []),
    "a reward of tokens": (texts(), "judge.counts_tokens", []),
    "part of the rows": (texts(), "judge.exact", [], {"offset": 1, "limit": 3}),
    "part of the rows, with repeats": ([*texts(), *texts()], "judge.exact", [], {"offset": 1, "limit": 3}),
    "the paper's reward": (texts(), "dapo_math", []),
    "the paper's reward by its path": (texts(), "trl_dapo.rewards.dapo_math_reward", []),
    "the paper's reward, messages": (messages(), "dapo_math", []),
    "the paper's reward, bad rows": (texts(["4", "proof", "6", "7"]), "dapo_math", ["--on_bad_rows", "skip"]),
    "verl's columns": (verl(), "dapo_math", []),
    "problems and answers": (problems(), "last_number", []),
    "problems and answers, boxed": (problems(), "last_number", ["--prompt_style", "boxed"]),
    "questions, a user's reward": (problems(problem="question"), "judge.exact", []),
    "a folder of splits": (texts(), "judge.exact", [], {"is_folder": True}),
    "a folder of splits, the paper's reward": (texts(), "dapo_math", [], {"is_folder": True}),
    "math-verify": (problems(), "math_verify", []),
    "a reward without columns": (texts(), "bare_number", []),
    "a minimum of the probability": (texts(), "judge.exact", [], {"min_p": 0.25}),
    "suppressed tokens": (texts(), "judge.exact", [], {"suppress": [5, 6]}),
}


@pytest.fixture
def model(tmp_path):
    """Saves the tiny model with a chat template of its own."""

    def save(template, suppress):
        tokenizer, model = make_tokenizer(), make_model()
        tokenizer.chat_template = template
        model.generation_config.suppress_tokens = suppress
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


class Asked:
    """Replaces `generate`. It records the prompts, and returns K texts per prompt, in turn."""

    def __init__(self):
        self.prompts, self.settings = [], []

    def generate(self, model, input_ids, attention_mask, generation_config, **kwargs):
        config, _ = model._prepare_generation_config(generation_config, **kwargs)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id", "suppress_tokens")
        self.settings.append({name: getattr(config, name) for name in names})
        tokenizer, rows, dealt = make_tokenizer(), [], Counter()
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            prompt = ids[mask.bool()].tolist()
            text = SAYS[(sum(prompt) + dealt[tuple(prompt)] % K) % len(SAYS)]
            dealt[tuple(prompt)] += 1
            self.prompts.append(prompt)
            rows.append([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        width = max(map(len, rows))
        padded = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        return torch.cat([input_ids, padded], dim=1)


@pytest.fixture
def asked(monkeypatch):
    asked = Asked()
    monkeypatch.setattr(GenerationMixin, "generate", lambda model, **kwargs: asked.generate(model, **kwargs))
    return asked


@pytest.fixture
def calls(monkeypatch):
    """The keywords of every call of a reward function."""
    calls, wrap_reward = [], checks.wrap_reward

    def keep(keywords):
        functions = ("log_extra", "log_metric")
        state = keywords["trainer_state"]
        kept = {name: copy.deepcopy(value) for name, value in keywords.items() if name not in functions}
        calls.append(kept | {"trainer_state": (type(state), state.global_step)})

    def spying(reward_func, name, **how):
        if inspect.iscoroutinefunction(reward_func):

            async def spy(**keywords):
                keep(keywords)
                return await reward_func(**keywords)
        else:

            def spy(**keywords):
                keep(keywords)
                return reward_func(**keywords)

        return wrap_reward(spy, name, **how)

    monkeypatch.setattr(checks, "wrap_reward", spying)
    return calls


def write(path, rows):
    frame = pd.DataFrame(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)


def in_turn(keywords):
    """Each row's keywords with their types, in an order that does not depend on how the calls are cut."""
    lists = {name: values for name, values in keywords.items() if isinstance(values, list)}
    assert {len(values) for values in lists.values()} == {len(keywords["completions"])}
    rows = [{name: values[i] for name, values in lists.items()} for i in range(len(keywords["completions"]))]
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


@pytest.mark.parametrize("case", TABLE)
def test_training_and_the_command_ask_and_score_the_same(case, tmp_path, monkeypatch, model, asked, calls, capsys):
    rows, reward, options, *others = TABLE[case]
    how = {"kind": "jsonl", "template": CHAT, "suppress": None, **(others[0] if others else {})}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(JUDGE)
    monkeypatch.delitem(sys.modules, "judge", raising=False)
    folder = model(how["template"], how["suppress"])
    if how.get("is_folder"):  # as a dataset on the Hub
        held_out, train = tmp_path / "data" / "test.jsonl", tmp_path / "data" / "train.jsonl"
        train.parent.mkdir()
        to_train, to_evaluate = ["--dataset_name", "data"], ["--dataset", "data", "--split", "test"]
    else:
        held_out, train = tmp_path / f"held_out.{how['kind']}", tmp_path / f"train.{how['kind']}"
        to_train = ["--dataset_name", train.name, "--eval_dataset_name", held_out.name]
        to_evaluate = ["--dataset", held_out.name]
    write(held_out, rows)
    # As many rows of the same kind to train on, with other prompts.
    write(train, json.loads(json.dumps(rows).replace(" of ", " out of ")))

    words = [
        *("--model_name_or_path", folder, "--output_dir", "run", "--use_cpu", "true", "--bf16", "false"),
        *("--dtype", "float32", "--report_to", "none", "--reward_funcs", reward, *options),
        *to_train,
        *("--eval_strategy", "steps", "--per_device_eval_batch_size", str(K * len(rows))),
        *("--num_generations", str(K), "--per_device_train_batch_size", str(K), "--max_completion_length", "16"),
    ]
    words += [
        word for name in ("offset", "limit") if name in how for word in (f"--eval_dataset_{name}", str(how[name]))
    ]
    if "threshold" in how:
        words += ["--dynamic_sampling_accuracy_threshold", str(how["threshold"])]
    if "min_p" in how:
        words += ["--min_p", str(how["min_p"])]
    trainer = DAPOTrainer(**trainer_arguments(*make_parser().parse_args_and_config(words)))
    calls.clear()
    metrics = trainer.evaluate()
    in_training, asked_in_training = calls[-1], Asked()
    vars(asked_in_training).update(copy.deepcopy(vars(asked)))
    asked.prompts.clear(), asked.settings.clear()

    command = ["eval", "--model", folder, *to_evaluate, "--output_dir", "out", *options]
    command += ["--k", str(K), "--scorer", reward, "--top_p", "1", "--max_completion_length", "16"]
    for name in ("offset", "limit", "min_p"):
        command += [f"--{name}", str(how[name])] if name in how else []
    command += ["--batch_size", str(K * len(rows))]
    if "threshold" in how:
        command += ["--accuracy_threshold", str(how["threshold"])]
    calls.clear()
    status = main(command)

    assert sorted(asked.prompts) == sorted(asked_in_training.prompts)
    assert asked.settings[0] == asked_in_training.settings[0]
    on_the_line = calls[-1]
    assert on_the_line.keys() == in_training.keys()
    assert on_the_line["trainer_state"] == in_training["trainer_state"]
    scores = {name.removeprefix("eval_"): value for name, value in metrics.items() if "@" in name}
    if case == "partial credit":
        assert status == 2
        assert "'judge.graded' gives scores" in capsys.readouterr().err
        assert scores == {}
        return
    assert status == 0
    assert in_turn(on_the_line) == in_turn(in_training)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    found = {name: each["mean"] for name, each in summary["metrics"].items() if name != "pass@2"}
    assert found == pytest.approx({name: value for name, value in scores.items() if "/" not in name})
    assert 0 < found[f"avg@{K}"] < 1 or case in ("decimals", "truth values")
