# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The ends of completions, and which are cut off: stops that are not the model's end tokens, on every engine."""

from types import SimpleNamespace

import pytest
from helpers import number, prompts, right, tiny_config, watch_training
from scripted_server import SleepingEngine, StandIn, ahead_config, stand_ins
from transformers import AutoConfig, AutoTokenizer

from trl_dapo import DAPOTrainer
from trl_dapo.engines.stops import Stops
from trl_dapo.run.ledger import read_ledger
from trl_dapo.settings.sampling_defaults import PAPER


LIMIT = 8
# Without an end token of the model, `ht` and `ng` end "right" and "wrong"; "right right" is cut off before its end.
STOPS = {"stop": ["ht", "ng"]}


def any_letter(completions, **kwargs):
    return [float(bool(completion) and ord(completion[0]) % 2) for completion in completions]


def loss_rows(trainer):
    """The loss tokens of each row that trains, and how many tokens its rollout had room for."""
    rows = []

    def look(inputs):
        for ids, mask in zip(inputs["completion_ids"], inputs["completion_mask"].bool(), strict=True):
            if mask.any():
                rows.append(ids[mask].tolist())

    watch_training(trainer, look)
    return rows


@pytest.mark.parametrize(("dynamic", "continuous"), [(False, False), (True, False), (True, True)])
def test_nothing_behind_a_stop_is_in_the_loss_and_only_what_reached_the_limit_is_cut_off(
    tiny_model, tmp_path, dynamic, continuous
):
    """More than half of the loss tokens were padding after the stops of a batch."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    stops = [i for i in range(len(tokenizer)) if i % 3 == 0 and i not in tokenizer.all_special_ids]
    args = tiny_config(
        tmp_path,
        generation_kwargs={"eos_token_id": stops},
        use_dynamic_sampling=dynamic,
        use_transformers_continuous_batching=continuous,
        transformers_continuous_batching_config={"num_blocks": 64, "max_batch_tokens": 64} if continuous else None,
        max_completion_length=LIMIT,
        max_steps=1,
        **(PAPER if dynamic else {}),
    )
    trainer = DAPOTrainer(tiny_model, any_letter, args, train_dataset=prompts(40))
    rows = loss_rows(trainer)
    trainer.train()
    ends = {*stops, tokenizer.eos_token_id}
    assert len(rows) == 16
    assert any(len(row) < LIMIT for row in rows)
    for row in rows:
        assert tokenizer.pad_token_id not in row or tokenizer.pad_token_id in ends
        assert not ends & {*row[:-1]}  # a stop is the last token
        assert row[-1] in ends or len(row) == LIMIT
    if not dynamic:  # every row that was sampled trains
        cut_off = sum(row[-1] not in ends for row in rows)
        assert trainer.state.log_history[0]["completions/clipped_ratio"] == cut_off / 16


@pytest.fixture
def without_end_tokens(monkeypatch):
    """
    Engines that answer "right" or "wrong" without an end token, as if `stop` ended it, and that cut off the answers to
    prompts from 7 on.
    """

    def text(prompt, i):
        if number(prompt) % 7 == 0:
            return "aaaaaaaaaaaaaaa"
        return "right" if number(prompt) % 3 and i % 2 else "wrong"

    def generate(self, prompts, sampling_params, use_tqdm):
        self.calls.append("generate")
        outputs = []
        for i, prompt in enumerate(prompts):
            ids = self.tokenizer(text(self.tokenizer.decode(prompt["prompt_token_ids"]), i))["input_ids"][:LIMIT]
            logprobs = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in ids]
            output = SimpleNamespace(token_ids=ids, logprobs=logprobs)
            outputs.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output]))
        return outputs

    def complete(self, prompt, i, max_tokens, temperature, engine):
        ids = self.tokenizer(text(self.tokenizer.decode(prompt), i))["input_ids"][:max_tokens]
        return ids, [[-1.0]] * len(ids)

    monkeypatch.setattr(SleepingEngine, "generate", generate)
    monkeypatch.setattr(StandIn, "_complete", complete)


ENGINES = {
    "colocate": {"vllm_mode": "colocate"},
    "server": {"vllm_mode": "server"},
    "server, rollouts ahead": {"rollouts_ahead": 1},
    "server, without dynamic sampling": {"vllm_mode": "server", "use_dynamic_sampling": False},
}


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_what_a_stop_ended_is_not_cut_off_and_trains_under_overlong_filtering(
    tiny_model, tmp_path, without_end_tokens, settings
):
    """It was filtered completely, with the advice to raise the limit."""
    common = {"generation_kwargs": STOPS, "overlong_filtering": True, "max_completion_length": LIMIT, "max_steps": 2}
    common |= {"log_groups": 100} if settings.get("use_dynamic_sampling", True) else {}
    if settings.get("rollouts_ahead"):
        args = ahead_config(tmp_path, **common)
    else:
        args = tiny_config(tmp_path, use_vllm=True, shuffle_dataset=False, **common, **settings)
    with stand_ins(tiny_model):
        trainer = DAPOTrainer(tiny_model, right, args, train_dataset=prompts(80), eval_dataset=prompts(4))
        rows = loss_rows(trainer)
        trainer.train()
        evaluated = trainer.evaluate()
    texts = trainer._tokenizer.batch_decode(rows)
    assert {*texts} == {"right", "wrong"}
    # The first of prompts 0 to 3 is cut off at the limit.
    assert evaluated["eval_completions/clipped_ratio"] == 1 / 4
    assert evaluated["eval_completions/max_terminated_length"] == len(trainer._tokenizer("right")["input_ids"])
    for group in read_ledger(tmp_path).to_pylist() if trainer.args.use_dynamic_sampling else ():
        assert group["truncated"] == [number(group["prompt"]) % 7 == 0] * len(group["truncated"])
        assert (group["drop_reason"] == "masked") == all(group["truncated"])
    if not trainer.args.use_dynamic_sampling:
        # Prompts 0 to 3 and 4 to 7: each batch has one whose completions are cut off, and these have no weight.
        assert len(rows) == 2 * 12
        assert [log["completions/clipped_ratio"] for log in trainer.state.log_history[:2]] == [1 / 4, 1 / 4]


def stops(tiny_model, **settings):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return Stops(tokenizer, ends=[tokenizer.eos_token_id], use_vllm=True, **settings), tokenizer


def test_a_completion_is_cut_off_unless_it_ends_in_a_stop_or_an_end_token(tiny_model):
    ends, tokenizer = stops(tiny_model, generation_kwargs={"stop": "ht", "stop_token_ids": [5]})
    right = tokenizer("right")["input_ids"]
    assert not ends.is_cut_off(right)
    assert ends.is_cut_off(right[:-1])
    assert not ends.is_cut_off([*right[:-1], 5])
    assert not ends.is_cut_off([*right[:-1], tokenizer.eos_token_id])
    assert not ends.is_cut_off([*right[:-1], tokenizer.pad_token_id])


def test_of_several_turns_the_last_decides_and_tokens_of_a_tool_end_none(tiny_model):
    ends, tokenizer = stops(tiny_model, generation_kwargs={"stop": ["ht"]})
    turn, other = tokenizer("right")["input_ids"], tokenizer("a tool says")["input_ids"]
    model, tool = [1] * len(turn), [0] * len(other)
    assert not ends.is_cut_off([*other, *turn], [*tool, *model])
    assert ends.is_cut_off([*turn, *other], [*model, *tool])
    assert ends.is_cut_off([*turn, *other, *turn[:-1]], [*model, *tool, *model[:-1]])


def test_a_list_of_end_tokens_needs_a_trl_that_knows_of_several(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_dapo.update.compat.knows_end_tokens", lambda trainer: False)
    args = tiny_config(tmp_path, generation_kwargs={"eos_token_id": [5, 6]})
    with pytest.raises(ValueError, match=r"`generation_kwargs\['eos_token_id'\]=\[5, 6\]` needs trl>=1\.14\.2"):
        DAPOTrainer(tiny_model, right, args, train_dataset=prompts(24))


def test_an_end_token_that_the_model_does_not_have_is_refused(tiny_model, tmp_path):
    vocab_size = AutoConfig.from_pretrained(tiny_model).vocab_size
    args = tiny_config(tmp_path, generation_kwargs={"eos_token_id": [5, vocab_size]})
    with pytest.raises(
        ValueError, match=rf"contains {vocab_size}, but the model's vocabulary has only {vocab_size} tokens"
    ):
        DAPOTrainer(tiny_model, right, args, train_dataset=prompts(24))
