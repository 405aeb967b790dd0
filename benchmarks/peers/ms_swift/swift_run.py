# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
One run of ms-swift's GRPO trainer on the CPU, in the environment of requirements.txt. study.py calls it:

    python swift_run.py JOB RESULT    # two JSON files

ms-swift is used unchanged. Three methods of its trainer are wrapped to note what was sampled, judged and trained on.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace


# Set before torch and the Hub client are imported.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
sys.path.append(str(Path(__file__).parents[3]))  # for the curve that all trainers share

import torch
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import ORM, orms
from swift.template import TemplateMeta, register_template
from transformers import PrinterCallback, ProgressCallback

from benchmarks.frame.curves import Curve, accuracy


class ExactAnswer(ORM):
    """Return 1.0 if the completion is the solution and 0.0 otherwise, like `exact_answer_reward`."""

    def __call__(self, completions, solution, **kwargs):
        return [float(completion == answer) for completion, answer in zip(completions, solution, strict=True)]


class Watch:
    """
    Note for every rollout: the prompts of each round, the groups of the rounds that were used whose rewards differ,
    the prompts that train, the number of their groups whose rewards differ, and whether the first batch trains after
    all.
    """

    def __init__(self, trainer):
        self.num_tokens = 0
        self.rollouts = []
        self._num_generations = trainer.num_generations
        self._asked, self._judged = [], []
        self._generate, self._fill, self._std = (
            trainer._generate_completions,
            trainer._dynamic_sampling,
            trainer.compute_std,
        )
        trainer._generate_completions, trainer._dynamic_sampling = self.generate, self.fill
        trainer.compute_std = self.judge

    def _prompts(self, samples):
        return [sample.messages[0]["content"] for sample in samples[:: self._num_generations]]

    def generate(self, samples):
        samples = self._generate(samples)
        self.num_tokens += sum(len(sample.response_token_ids) for sample in samples)
        self._asked.append(self._prompts(samples))
        return samples

    def judge(self, samples, rewards):
        std = self._std(samples, rewards)
        self._judged.append((std[:: self._num_generations] > 0).tolist())
        return std

    def fill(self, samples, rewards):
        first = samples
        samples, rewards = self._fill(samples, rewards)
        # Counted from the rewards and not by `judge`, which sees only what ms-swift itself uses.
        groups = rewards.view(-1, self._num_generations)
        rollout = {
            "asked": self._asked,
            "judged": self._judged,
            "trained": self._prompts(samples),
            "useful": int((groups.amax(dim=1) > groups.amin(dim=1)).sum()),
            "fell_back": samples is first,
        }
        self.rollouts.append(rollout)
        self._asked, self._judged = [], []
        return samples, rewards


class Run(SwiftRLHF):
    """Run ms-swift's `rlhf` command with a clock."""

    def __init__(self, job, argv):
        super().__init__(argv)
        self.job = job

    def train(self, trainer):
        model, tokenizer = trainer.model, trainer.processing_class
        watch, num_rollouts = Watch(trainer), self.job["num_rollouts"]
        limits = dict.fromkeys(("target", "max_tokens", "max_seconds"), float("inf"))
        job = SimpleNamespace(num_rollouts=num_rollouts, probe_every=num_rollouts, **limits)
        probe_model = lambda: {"accuracy": accuracy(model, tokenizer, self.job["held_out"])}  # noqa: E731
        curve = Curve(job, probe_model, lambda: watch.num_tokens)
        trainer.add_callback(curve)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        order = [row["messages"][0]["content"] for row in trainer.train_dataset]
        self.result = {"curve": curve.points, "rollouts": watch.rollouts, "grad_norms": norms, "order": order}
        return {}


def main(job_file, result_file):
    torch.set_num_threads(1)
    orms["exact_answer"] = ExactAnswer
    # The prompt in the tokenizer's chat template: `17+05=`.
    register_template(TemplateMeta("arithmetic", prefix=[], prompt=["{{QUERY}}="], chat_sep=None, suffix=["<eos>"]))
    job = json.loads(Path(job_file).read_text())
    run = Run(job, [word for name, value in job["options"].items() for word in (f"--{name}", str(value))])
    run.main()
    Path(result_file).write_text(json.dumps(run.result))


if __name__ == "__main__":
    main(*sys.argv[1:])
