# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts that call tools, and prompts with images: sampled once, and replayed unchanged."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import scripted, tiny_config
from PIL import Image

from trl_dapo import DAPOTrainer


def record_rollouts(trainer):
    rollouts, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: rollouts.append(generate(inputs)) or dict(rollouts[-1])
    return rollouts


# ---- Tools ----


def test_a_tool_is_called_once_a_completion_and_its_result_is_not_trained_on(tool_model, tmp_path):
    """Prompts 0, 3, 6, ... are never solved. For the others, the first of each 4 completions is correct."""
    calls = []

    def double(number: int) -> int:
        """
        Doubles a number.

        Args:
            number: The number.
        """
        calls.append(number)
        return 2 * number

    def script(text, i):
        number = int(text.split("double ")[1].split(".")[0])
        if "<tool_response>" not in text.split("double ")[1]:
            call = f'{{"name": "double", "arguments": {{"number": {number}}}}}'
            return f"<tool_call>\n{call}\n</tool_call><|im_end|>"
        return f"{2 * number if number % 3 and i % 4 == 0 else 'none'}<|im_end|>"

    def right(completions, solution, **kwargs):
        return [float(x[-1]["content"].strip() == s) for x, s in zip(completions, solution, strict=True)]

    questions = [[{"role": "user", "content": f"double {i}."}] for i in range(24)]
    dataset = Dataset.from_dict({"prompt": questions, "solution": [str(2 * i) for i in range(24)]})
    args = tiny_config(tmp_path, shuffle_dataset=False, max_steps=1, max_completion_length=256)
    trainer = scripted(DAPOTrainer, script)(tool_model, right, args, train_dataset=dataset, tools=[double])
    rollouts = record_rollouts(trainer)
    trainer.train()

    logs = trainer.state.log_history[0]
    assert logs["trained_reward"] == 1 / 4
    assert len(calls) == logs["dynamic_sampling/completions_generated"]  # no tool calls in the replay
    assert calls[:4] == [0] * 4
    (rollout,) = rollouts
    num_answer_tokens, num_call_tokens = 0, 0
    columns = [rollout[name] for name in ("completion_ids", "tool_mask", "completion_mask")]
    for ids, tool_mask, mask in zip(*columns, strict=True):
        call, answer, rest = trainer._tokenizer.decode(ids[(tool_mask * mask).bool()]).split("<|im_end|>")
        assert '"name": "double"' in call
        assert answer in ("none", "2", "4", "8", "10")  # of prompts 1, 2, 4 and 5
        assert rest == ""
        assert "<tool_response>" in trainer._tokenizer.decode(ids[(mask * (1 - tool_mask)).bool()])
        num_call_tokens += len(trainer._tokenizer(call)["input_ids"]) + 1
        num_answer_tokens += len(answer) + 1
    assert logs["dynamic_sampling/tokens_trained"] == num_call_tokens + num_answer_tokens


# ---- Images ----


def grey(i):
    return Image.fromarray(np.full((8, 8, 3), 10 * i, dtype=np.uint8))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_prompts_with_images_train_on_the_images_of_the_groups_that_were_kept(image_model, tmp_path, beta):
    """Prompt i shows the gray value 10 i, so the pixels that reach the model identify the prompts that train."""

    def script(text, i):
        return ("right" if int(text.split("prompt ")[1].split(":")[0]) % 3 and i % 4 == 0 else "wrong") + "<eos>"

    def right(completions, **kwargs):
        return [float(completion[0]["content"] == "right") for completion in completions]

    messages = [[{"role": "user", "content": f"prompt {i}:"}] for i in range(24)]
    dataset = Dataset.from_dict({"prompt": messages, "image": [grey(i) for i in range(24)]})
    args = tiny_config(tmp_path, shuffle_dataset=False, max_steps=1, beta=beta)
    trainer = scripted(DAPOTrainer, script)(image_model, right, args, train_dataset=dataset)
    rollouts = record_rollouts(trainer)
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    (rollout,) = rollouts
    processor = trainer.processing_class.image_processor
    expected = processor([grey(i) for i in (1, 2, 4, 5) for _ in range(4)], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(rollout["pixel_values"], expected)
    prompts = trainer._tokenizer.batch_decode(rollout["prompt_ids"])
    assert [int(text.split("prompt ")[1].split(":")[0]) for text in prompts[::4]] == [1, 2, 4, 5]
    assert all(text.count("<image>") == 4 for text in prompts)
    assert trainer.state.log_history[0]["trained_reward"] == 1 / 4
    assert not torch.equal(before, trainer.model.get_input_embeddings().weight)
