# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Tasks, each made so that one mechanism can act: the quickstart's arithmetic, taught in different ways.

- few informative: the quickstart's model; half of its prompts are never solved, and one in six nearly always
- unlikely: the teacher writes the correct sum one time in seven, so the correct sum must first become likely
- workings: the ladder's task, with the problem repeated after the answer as often as its first digit says; short and
  long completions
- workings cut off: the same with the ladder's limit of 24 tokens, which four repetitions exceed
- any length: the same model and limit. A completion is correct if its answer is correct and it has ended, whatever it
  writes after the answer. So a correct answer that is cut off is punished, as in the paper
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from trl_dapo.cli.quickstart import FAMILIES, Problems, build_model, build_tokenizer, warm_up

from .. import ladder
from ..frame.runs import fingerprint, quiet
from ..time_to_accuracy import draw_prompts


SEED = 42  # of the checkpoints and of the held-out problems
SUMS = ("2 digits + 1 digit", "2 digits + 2 digits")
END_TOKEN = build_tokenizer().eos_token_id


def slipped(answer, draw):
    """Return the answer changed by 1 or by 10, like the slips of the quickstart's teacher."""
    return f"{max(0, int(answer[::-1]) + draw.choice([-10, -1, 1, 10])):03d}"[::-1]


class UnlikelyProblems(Problems):
    """
    Problems of which the teacher writes the correct sum one time in seven, and one of the incorrect sums more often.
    """

    slip = 6 / 7

    def draw_examples(self, num_examples):
        """Return problems with the teacher's answers."""
        examples = []
        for problem in self.draw(num_examples):
            slips = problem.family in SUMS and self._random.random() < self.slip
            answer = slipped(problem.answer, self._random) if slips else problem.answer
            examples.append(f"{problem.text}={answer}")
        return examples


def whole(text, solution):
    """Return whether the whole text is correct."""
    return text == solution


def answer_first(text, solution):
    """Return whether the answer is correct, whatever follows it."""
    return text.partition("=")[0] == solution.partition("=")[0]


class Task(NamedTuple):
    checkpoint: str  # key of `CHECKPOINTS`
    shares: dict[str, float]  # of the families among the prompts
    max_length: int  # the limit of a completion, in tokens
    room: int  # the limit when the probe samples what a completion would have become
    is_correct: Callable
    num_prompts: int = 1024
    has_workings: bool = False  # after the answer
    must_end: bool = False  # whether the reward requires that a completion has ended

    def solution(self, problem):
        return problem.answer + (ladder.task.working(problem.text) if self.has_workings else "")

    @property
    def is_one_text(self):
        """Whether only one completion is correct, so that its probability can be computed from the logits."""
        return self.is_correct is whole

    def reward(self, completions, solution, completion_ids, **kwargs):
        """Reward function: 1 if the completion is correct, -1 otherwise."""
        rewards = []
        for completion, expected, ids in zip(completions, solution, completion_ids, strict=True):
            is_correct = self.is_correct(completion[0]["content"], expected)
            has_ended = ids[-1:] == [END_TOKEN]
            rewards.append(1.0 if is_correct and (has_ended or not self.must_end) else -1.0)
        return rewards

    def held_out(self, num_problems):
        """Return the first held-out problems of the families that can be learned."""
        problems = [problem for problem in Problems(SEED).held_out if problem.family in SUMS]
        return random.Random(SEED).sample(problems, num_problems)

    def prompts(self, seed):
        """Return training prompts without repetition, in random order."""
        found = draw_prompts(Problems(SEED).train, self.shares, seed, self.num_prompts, self.solution)
        return found.remove_columns("source")


ONLY_SUMS = dict(zip(SUMS, (0.3, 0.7), strict=True))
AS_TAUGHT = {family.name: family.share for family in FAMILIES}
FEW = {"1 digit + 1 digit": 0.16, "2 digits + 1 digit": 0.1, "2 digits + 2 digits": 0.24, "2 digits * 2 digits": 0.5}

TASKS = {
    "few informative": Task("quickstart", FEW, 8, 8, whole, num_prompts=512),
    "unlikely": Task("unlikely", ONLY_SUMS, 8, 8, whole),
    "workings": Task("workings", AS_TAUGHT, 40, 40, whole, has_workings=True),
    "workings cut off": Task("workings", AS_TAUGHT, 24, 40, whole, has_workings=True),
    "any length": Task("workings", ONLY_SUMS, 24, 40, answer_first, has_workings=True, must_end=True),
}

# The problems of each supervised phase of a checkpoint.
CHECKPOINTS = {
    "quickstart": (Problems,),
    "unlikely": (UnlikelyProblems,),
    "workings": (Problems, ladder.task.WorkedProblems),
}


def make_checkpoints(folder, num_steps):
    """Return a folder with the models after their warm-up. It is kept for the next call."""
    made_by = fingerprint(make_checkpoints)[:4] + fingerprint(ladder.task.working)[:4]
    path = folder / f"checkpoints-{num_steps}-{made_by}"
    if not path.exists():
        quiet()
        partial, tokenizer = folder / "checkpoints.partial", build_tokenizer()
        for name, (first, *others) in CHECKPOINTS.items():
            model = build_model(tokenizer, SEED)
            warm_up(model, tokenizer, first(SEED), num_steps)
            for problems in others:  # as in the ladder: at a learning rate that does not change the answers
                warm_up(model, tokenizer, problems(SEED), num_steps, batch_size=64, learning_rate=7e-4)
            model.save_pretrained(partial / name)
            tokenizer.save_pretrained(partial / name)
        partial.rename(path)
    return path
