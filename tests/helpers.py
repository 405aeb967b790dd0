# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for several test files: a config for a tiny model, a trainer with scripted completions, and launches."""

import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import forks
import torch
import torch.distributed as dist
import torch.distributed.run
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import is_peft_model
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.update.old_logps import fill_old_logps


TIMED = ("_seconds", "step_time", "_runtime", "_per_second", "rollouts_ahead/groups_waited_for")


def tiny_config(output_dir, **overrides) -> DAPOConfig:
    """The default settings, with 4 prompts x 4 completions per rollout and one optimizer step for each."""
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    return DAPOConfig(str(output_dir), **{**settings, **overrides})


def prompts(num: int, **columns) -> Dataset:
    return Dataset.from_dict({"prompt": [f"prompt {i}:" for i in range(num)], **columns})


def number(text: str) -> int:
    """Return which of `prompts` a text begins with."""
    return int(text.split()[1].rstrip(":"))


def right(completions, **kwargs):
    return [float(completion.startswith("right")) for completion in completions]


def is_dummy(completion):
    """Return whether a completion was made up by the preflight check, which calls the reward functions with it."""
    return "Answer: " in completion


def mixed_unless_multiple_of_3(text, i):
    """Prompts 0, 3, 6, ... are never solved. For the others, the first of each 4 completions is correct."""
    return "right" if number(text) % 3 and i % 4 == 0 else "wrong"


def letters(prompts, completions, **kwargs):
    """Prompts 0, 3, 6, ... are never rewarded. For the others, hardly two completions get the same reward."""
    return [
        sum(map(ord, completion)) % 997 if number(prompt) % 3 else 0
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


class ScriptedTrainer(DAPOTrainer):
    """
    A trainer whose completions are `script(prompt text, index among the rows of all processes)`. The rest is real.
    """

    def __init__(self, *args, script, **kwargs):
        self.script = script
        self.sampled = []  # prompt text of every sampled completion, in order
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        texts = self.processing_class.batch_decode(prompt_ids)
        self.sampled += texts
        first = self.accelerator.process_index * len(texts)
        completions = [self.script(text, first + i) for i, text in enumerate(texts)]
        ends = [self.processing_class.eos_token_id]
        return [
            self.processing_class(completion.removesuffix("..."))["input_ids"]
            + ([] if completion.endswith("...") else ends)
            for completion in completions
        ], None


def scripted(trainer_class, script):
    """Return a `trainer_class` whose completions are `script(prompt text, index)`."""

    class Scripted(trainer_class):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            texts = self._tokenizer.batch_decode(prompt_ids)
            return [self._tokenizer(script(text, i))["input_ids"] for i, text in enumerate(texts)], None

    return Scripted


def spy_on_training(trainer):
    """Record the rows that reach the loss: prompt text, completion text, advantage, number of loss tokens."""
    seen, compute_loss = [], trainer._compute_loss

    def spy(model, inputs):
        decode = trainer.processing_class.batch_decode
        seen.extend(
            zip(
                decode(inputs["prompt_ids"], skip_special_tokens=True),
                decode(inputs["completion_ids"], skip_special_tokens=True),
                inputs["advantages"].tolist(),
                inputs["completion_mask"].sum(1).tolist(),
                strict=True,
            )
        )
        return compute_loss(model, inputs)

    trainer._compute_loss = spy
    return seen


def make_trainer(
    tiny_model, tmp_path, script=mixed_unless_multiple_of_3, reward_funcs=right, num_prompts=24, **overrides
):
    args = tiny_config(tmp_path, shuffle_dataset=False, **overrides)
    return ScriptedTrainer(tiny_model, reward_funcs, args, train_dataset=prompts(num_prompts), script=script)


def weights(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def untimed(log_history):
    """
    Return the part of a run's logs that must be equal, bit for bit, when the run is repeated: no times, and no final
    summary.
    """
    return [
        {k: v for k, v in log.items() if not k.endswith(TIMED)} for log in log_history if "train_runtime" not in log
    ]


def run_job(jobs: dict):
    """Call the function that is named on the command line."""
    jobs[sys.argv[1]](*sys.argv[2:])
    gc.collect()
    # Before the interpreter exits. Otherwise a gloo thread that requests its lock then would abort a finished job.
    if dist.is_initialized():
        dist.destroy_process_group()


def watch_training(trainer, look):
    """Call `look(inputs)` before each loss in training, with its rows, old log-probabilities and weights."""
    make = trainer._objective

    def objective():
        made = make()

        def loss(inputs, mask, logps, *args):
            if trainer.model.training:
                old = fill_old_logps(inputs.get("old_per_token_logps"), logps)
                seen = {**inputs, "old_per_token_logps": old}
                if made.importance_weight is not None and "importance_sampling_ratio" not in inputs:
                    log_ratio = old - inputs["sampling_per_token_logps"]
                    seen["importance_sampling_ratio"] = made.importance_weight(log_ratio, mask)
                look(seen)
            return made.loss(inputs, mask, logps, *args)

        return SimpleNamespace(loss=loss, importance_weight=made.importance_weight)

    trainer._objective = objective


def rollouts_and_the_first_policys_logps(trainer) -> tuple[list[dict], torch.Tensor]:
    """
    Train on two rollouts. Return them, and the log-probabilities of the second under the policy that sampled the
    first.
    """
    policies, rollouts, generate = [], [], trainer._generate_and_score_completions

    def spy(inputs):
        policies.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
        rollouts.append(generate(inputs))
        return dict(rollouts[-1])

    trainer._generate_and_score_completions = spy
    trainer.train()
    trainer.model.load_state_dict(policies[0])
    _, second = rollouts
    with torch.no_grad():
        logps, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer,
            trainer.model,
            torch.cat([second["prompt_ids"], second["completion_ids"]], dim=1),
            torch.cat([second["prompt_mask"], second["completion_mask"]], dim=1),
            second["completion_ids"].size(1),
        )
    return rollouts, logps


def errors_of_old_logps(trainer, path: str, temperature: float = 1.0, snapshots: dict | None = None) -> dict:
    """
    Return the errors of the old log-probabilities of rows that train, by step and staleness.

    The error is the difference from the log-probabilities of the weights that many rollouts before. `snapshots` are
    copies of the model by step, for steps before the run. There is one optimizer step per rollout.
    """
    snapshots, errors = {} if snapshots is None else snapshots, {}

    @torch.no_grad()
    def look(inputs):
        step = trainer.state.global_step
        if step not in snapshots:
            live = trainer.accelerator.unwrap_model(trainer.model)
            copied = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            if is_peft_model(live):
                copied = get_peft_model(copied, live.peft_config["default"])
            copied.load_state_dict(live.state_dict())
            snapshots[step] = copied.eval()
        for i, mask in enumerate(inputs["completion_mask"].bool()):
            if not mask.any():
                continue
            prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
            completion, age = (
                inputs["completion_ids"][i][mask],
                int(inputs["staleness"][i]) if "staleness" in inputs else 0,
            )
            logits = snapshots[step - age](torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            logps = (logits / temperature).log_softmax(-1).gather(-1, completion[:, None])[:, 0]
            error = (inputs["old_per_token_logps"][i][: len(completion)] - logps).abs().max().item()
            errors.setdefault((step, age), []).append(error)

    watch_training(trainer, look)
    return errors


def launch(
    job: str, *args, num_processes: int, jobs="jobs.py", accelerate_config: Path | None = None, timeout: int = 240
) -> subprocess.CompletedProcess:
    """
    Run a function of a file that ends with `run_job` in gloo processes with the environment of `accelerate launch`.
    """
    command = [str(Path(__file__).parent / jobs), job, *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if accelerate_config is not None:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        options = ["--config_file", str(accelerate_config), "--mixed_precision", "no"]
        options = launch_command_parser().parse_args([*options, "--num_processes", str(num_processes), *command])
        told = patch.object(torch.distributed.run, "run", lambda _: environment.update(os.environ))
        with patch.dict(os.environ, environment), told:
            launch_command(options)
    else:
        environment["ACCELERATE_USE_CPU"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        how = {"num_processes": num_processes, "timeout": timeout, "env": environment, "folder": Path(folder)}
        return subprocess.CompletedProcess(command, *forks.run(command, **how))


def run_preflight(trainer):
    """Try a run out in the same way as training does before anything is generated."""
    trainer.preflight.check_example()
    trainer.preflight.on_train_begin(trainer.args, trainer.state, trainer.control)
