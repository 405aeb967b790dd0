# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Mistakes that would otherwise waste hours of a run are reported, refused or corrected before the first rollout."""

import functools
import re

import pyarrow.parquet as pq
import pytest
import torch
from accelerate import DistributedType, PartialState
from datasets import Dataset
from helpers import ScriptedTrainer, make_trainer, mixed_unless_multiple_of_3, prompts, right, tiny_config
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.rewards import think_format_reward

from trl_dapo import DAPOTrainer
from trl_dapo.run.ledger import read_ledger
from trl_dapo.settings.sampling_defaults import PAPER


OPENS = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if think != 'no' %}<think>\n{% endif %}"


def thinking(model, folder, template, caplog, **settings):
    """Return the messages of a run whose prompts end in the way that the template produces."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    rows = [{"prompt": [{"role": "user", "content": f"prompt {i}:"}]} for i in range(24)]
    args = tiny_config(folder, max_steps=1, **settings)
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer, "script": lambda text, i: "right"}
    for _ in range(2):
        caplog.clear()
        trainer = ScriptedTrainer(model, [think_format_reward], args, **data)
        trainer.train()
    return [record.message for record in caplog.records if "think_format_reward" in record.message]


@pytest.mark.parametrize(
    ("variable", "engine"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "Dee")]
)
def test_sharding_that_accelerate_ignores_on_cpus_is_refused(tiny_model, tmp_path, monkeypatch, variable, engine):
    args = tiny_config(tmp_path)
    monkeypatch.setenv(variable, "true")
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.MULTI_CPU)
    with pytest.raises(ValueError, match=f"`use_cpu=True` makes accelerate ignore {engine}.* such as `cpu`, or set "):
        DAPOTrainer(tiny_model, right, args, train_dataset=prompts(24))


def test_a_template_that_opens_the_thinking_itself_is_said_once_where_a_reward_looks_for_that(
    tiny_model, tmp_path, caplog
):
    (said,) = thinking(tiny_model, tmp_path, OPENS, caplog)
    assert said.startswith("The chat template ends the prompt with `<think>`, so no completion begins with it")
    assert "`think_format_reward` is 0 for all completions" in said
    assert thinking(tiny_model, tmp_path, OPENS, caplog, chat_template_kwargs={"think": "no"}) == []
    assert thinking(tiny_model, tmp_path, OPENS.replace("<think>", "so:"), caplog) == []


class Scores:
    def __init__(self, word):
        self.word = word

    def __call__(self, completions, **kwargs):
        return [float(completion.startswith(self.word)) for completion in completions]


def starts(completions, word, **kwargs):
    return Scores(word)(completions)


TWINS = {
    "lambdas": ("<lambda>", [lambda completions, w=w, **_: Scores(w)(completions) for w in ("right", "wr")]),
    "partials": ("starts", [functools.partial(starts, word=w) for w in ("right", "wr")]),
    "instances": ("Scores", [Scores("right"), Scores("wr")]),
}


@pytest.mark.parametrize(("name", "rewards"), TWINS.values(), ids=TWINS)
def test_two_reward_functions_of_one_name_are_told_apart_in_the_log_the_table_and_the_ledger(
    tiny_model, tmp_path, caplog, name, rewards
):
    """The values of the second one replaced those of the first one."""
    settings = {"max_steps": 1, "log_completions": True, "dynamic_sampling_screen": "off"}
    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=rewards, **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    first, second = (log[f"rewards/{name}_{i}/mean"] for i in (1, 2))
    assert second == pytest.approx(1 - first)  # every completion begins with one of the two
    assert 0 < first < 1
    assert f"rewards/{name}/mean" not in log
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
    assert all(one + other == 1.0 for one, other in zip(table[f"{name}_1"], table[f"{name}_2"], strict=True))
    assert {f"rewards/{name}_1", f"rewards/{name}_2"} <= {*read_ledger(tmp_path).column_names}
    said = f"2 reward functions have the same name, {name!r}. They are logged as `{name}_1` and `{name}_2`"
    assert said in caplog.text


def test_a_rule_of_a_users_own_tells_two_rewards_of_one_name_apart(tiny_model, tmp_path):
    asked = []
    rewards = TWINS["lambdas"][1]
    data = {"train_dataset": prompts(24), "group_filter": lambda rewards, rows: asked.append({*rewards})}
    args = tiny_config(tmp_path, max_steps=1, dynamic_sampling_screen="off")
    ScriptedTrainer(tiny_model, rewards, args, script=mixed_unless_multiple_of_3, **data).train()
    assert asked[0] == {"<lambda>_1", "<lambda>_2"}


def with_adapter(model, **adapter):
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"), **adapter)


def test_a_reference_needs_an_adapter_of_the_name_that_trl_copies(tiny_model, tmp_path):
    said = r"`beta=0\.1` needs a reference model.*named 'default'.*adapters of this model are 'policy'.*`peft_config`"
    with pytest.raises(ValueError, match=said):
        DAPOTrainer(
            with_adapter(tiny_model, adapter_name="policy"),
            right,
            tiny_config(tmp_path, beta=0.1),
            train_dataset=prompts(24),
        )
    for adapter, beta in (({}, 0.1), ({"adapter_name": "policy"}, 0.0)):
        model = with_adapter(tiny_model, **adapter)
        DAPOTrainer(model, right, tiny_config(tmp_path, beta=beta), train_dataset=prompts(24))


MIXED = {
    "numbers and text": lambda i: "none" if i % 2 else i,
    "numbers and lists": lambda i: [i] if i % 2 else i / 2,
    "structs of other fields": lambda i: {"a": i} if i % 2 else {"a": "x"},
    "numbers too large": lambda i: 2 ** (i + 60),
    "objects": lambda i: Scores("x") if i % 2 else None,
}


@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_reward_function_logs_may_be_of_any_types(tiny_model, tmp_path, make, dynamic):
    """The run failed because pandas could not write the table of completions."""

    def logs(completions, log_extra, **kwargs):
        log_extra("note", [make(i) for i in range(len(completions))])
        log_extra("length", [len(completion) for completion in completions])
        return right(completions)

    settings = {"max_steps": 2, "log_completions": True} | (PAPER if dynamic else {"use_dynamic_sampling": False})
    make_trainer(tiny_model, tmp_path, reward_funcs=logs, **settings).train()
    table = pq.read_table(tmp_path / "completions" / "completions_00002.parquet").to_pydict()
    assert table["length"] == [len(completion) for completion in table["completion"]]  # unchanged
    given = {re.sub(" at 0x.*", "", str(make(i))) if make(i) is not None else None for i in range(64)}
    assert {note and re.sub(" at 0x.*", "", note) for note in table["note"]} <= given


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_column_that_was_logged_for_some_completions_only_does_not_end_the_run(
    tiny_model, tmp_path, caplog, is_dynamic
):
    column = f"some_{is_dynamic}"  # a message is given only once

    def logs(completions, log_extra, **kwargs):
        log_extra(column, ["x"])
        return right(completions)

    settings = {"max_steps": 1, "log_completions": True, "use_dynamic_sampling": is_dynamic}
    make_trainer(tiny_model, tmp_path, reward_funcs=logs, **settings).train()
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
    assert not any(table.get(column, []))
    assert f"`log_extra` was given 1 values of {column!r} for 16 completions" in caplog.text
