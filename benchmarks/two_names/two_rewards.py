# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
A task with two reward functions, as in most scripts of TRL: one judges correctness, the other the format.

The model is the quickstart's. Its teacher closes every other answer with `=`, as answers are closed with a tag
elsewhere: `17+05=220=`. The format reward asks for this sign. The correctness reward compares the answer, with or
without the sign. One prompt in three can be learned: the sums of larger numbers. One in six is nearly always solved,
and half of the prompts, the products, never are. A batch is one optimizer step, which is TRL's default.
"""

import json
import re

from trl_dapo.cli.quickstart import Problems, build_model, build_tokenizer, warm_up

from ..frame import trainers
from ..frame.curves import without_side_effects
from ..frame.measures import mean_of
from ..frame.runs import fingerprint, quiet
from ..frame.trainers import load
from ..time_to_accuracy import CHECKPOINT_SEED, NUM_WARM_UP_STEPS, draw_prompts


SHARES = {
    "1 digit + 1 digit": 0.16,
    "2 digits + 1 digit": 0.1,
    "2 digits + 2 digits": 0.24,
    "2 digits * 2 digits": 0.5,
}
LEARNABLE = ("2 digits + 1 digit", "2 digits + 2 digits")
NUM_TRAIN = 512
CLOSE = "="


class ClosingProblems(Problems):
    """The quickstart's problems; the teacher closes every other answer."""

    def draw_examples(self, num_examples):
        """Return problems with the teacher's answers."""
        examples = super().draw_examples(num_examples)
        return [example + CLOSE * (i % 2) for i, example in enumerate(examples)]


def texts_of(completions):
    return [completion[0]["content"] for completion in completions]


def correct(completions, solution, **kwargs):
    """Reward function: 1.0 if the answer is the solution, closed or not, and 0.0 otherwise."""
    pairs = zip(texts_of(completions), solution, strict=True)
    return [float(text.removesuffix(CLOSE) == expected) for text, expected in pairs]


def closed(completions, **kwargs):
    """Reward function: 1.0 if the completion consists of digits and the closing sign, and 0.0 otherwise."""
    return [float(re.fullmatch(rf"\d+{CLOSE}", text) is not None) for text in texts_of(completions)]


def held_out(problems):
    """Return every third held-out problem of those that can be learned, with its answer."""
    learnable = [problem for problem in problems.held_out if problem.family in LEARNABLE]
    return [f"{problem.text}={problem.answer}" for problem in learnable[::3]]


def pass_rates(model, tokenizer, texts):
    """Return the probability of a correct answer, closed or not, to each text like `17+05=220`."""
    texts = [text + CLOSE + tokenizer.eos_token for text in texts]  # one forward pass over `problem=answer=`
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    is_equals = batch["input_ids"] == tokenizer.convert_tokens_to_ids("=")
    in_answer = is_equals.cumsum(dim=1) == 1  # from the first sign to the one that closes
    with without_side_effects(model):
        logps = model(**batch).logits.float().log_softmax(dim=-1)
    of_next = logps[:, :-1].gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    of_answer = (of_next * (in_answer & ~is_equals)[:, 1:]).sum(dim=1).exp()
    ends, closes = logps[:, -3, tokenizer.eos_token_id].exp(), of_next[:, -2:].sum(dim=1).exp()
    return of_answer * (ends + closes)


def accuracy(model, tokenizer, texts):
    """Return the mean of [`pass_rates`]."""
    return pass_rates(model, tokenizer, texts).mean().item()


def train(job, checkpoint, folder, arm):
    """Train with both rewards; return the curve and the mean acceptance rate."""
    problems, tokenizer = Problems(CHECKPOINT_SEED), build_tokenizer()
    asked = held_out(problems)
    prompts = draw_prompts(problems.train, SHARES, job.seed, NUM_TRAIN, lambda problem: problem.answer)
    _, curve, log = trainers.train(
        *(job, arm, load(checkpoint), folder, [correct, closed], prompts, tokenizer),
        probe_model=lambda model: {"accuracy": accuracy(model, tokenizer, asked)},
    )
    return {"curve": curve, "acceptance": 1 - mean_of(log, "frac_reward_zero_std")}


def make_checkpoint(folder, num_steps=NUM_WARM_UP_STEPS):
    """Return the model after its warm-up, and its accuracy. The model is kept for the next call."""
    path = folder / f"two-rewards-{num_steps}-{fingerprint(make_checkpoint)[:8]}"
    if not path.exists():
        quiet()
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, CHECKPOINT_SEED)
        warm_up(model, tokenizer, ClosingProblems(CHECKPOINT_SEED), num_steps)
        partial = folder / "two-rewards.partial"
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        start = accuracy(model, tokenizer, held_out(Problems(CHECKPOINT_SEED)))
        (partial / "accuracy.json").write_text(json.dumps(start))
        partial.rename(path)
    return path, json.loads((path / "accuracy.json").read_text())
