# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of the recipe with a real language model, and one run of two_names/ on its problems."""

import json
import math
import random
import statistics
import time
from dataclasses import fields

import torch
import yaml
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, get_peft_config

from trl_dapo import DAPOTrainer
from trl_dapo.cli.train import load_datasets, make_parser
from trl_dapo.rewards import SoftOverlongPunishment, bare_number_reward, last_number_reward
from trl_dapo.settings.recipe_files import find_recipe

from ..frame import trainers
from ..frame.curves import without_side_effects
from ..frame.measures import mean_of
from ..frame.trainers import Watched, load, train_quietly


PRODUCTS, SUMS, CLIP = "products", "sums", "clip"
GRPO = "GRPO"  # the arm with TRL's trainer
NUM_ROLLOUTS = 16  # as in the recipe
NUM_STEPS = 16  # of the optimizer per rollout, in the part about the clip
RECIPE = "smollm2_135m_cpu"
REWARD = "last_number_reward"  # decides, and is the accuracy
PROBE_EVERY = 4  # rollouts
MAX_LENGTH = 16  # of a completion, as the recipe has it
NUM_ROWS = 32  # of a rollout: 4 prompts x 8 completions
NUM_ANSWERS, NUM_OF_TWO_NAMES = 4, 16  # of each held-out problem, per probe
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SUMS, NUM_PRODUCTS, NUM_HELD_OUT = 72, 24, 24  # of two numbers of two digits; the held-out problems are sums


class Stopwatch(TrainerCallback):
    """Add the CPU seconds so far to each line of the log."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.process_time()

    def on_log(self, args, state, control, **kwargs):
        state.log_history[-1]["cpu_seconds"] = time.process_time() - self.start


def curve_of(log, num_steps=1):
    """Record the accuracy on held-out problems by tokens and CPU seconds, without those of probes."""
    tokens, seconds, so_far, points = 0.0, 0.0, 0.0, []
    for entry in log:
        if "reward" in entry:
            tokens += tokens_of(entry)
            seconds += entry["cpu_seconds"] - so_far
        elif f"eval_rewards/{REWARD}/mean" in entry:
            point = {"rollouts": entry["step"] / num_steps, "tokens": tokens, "seconds": seconds}
            points.append({**point, "accuracy": entry[f"eval_rewards/{REWARD}/mean"]})
        so_far = entry.get("cpu_seconds", so_far)
    return points


def tokens_of(entry):
    """Return the tokens generated in a rollout. `GRPOTrainer` trains on all of them."""
    of_dapo = entry.get("dynamic_sampling/tokens_generated")
    return NUM_ROWS * entry["completions/mean_length"] if of_dapo is None else of_dapo


def write_sums(path):
    """Return sums, of which the model solves few, among products, of which it solves none, and the held-out sums."""
    rng = random.Random(0)
    pairs = rng.sample(
        [(a, b) for a in range(10, 100) for b in range(10, a + 1)], NUM_SUMS + NUM_PRODUCTS + NUM_HELD_OUT
    )
    problems = [(f"{a} * {b}", a * b) if i < NUM_PRODUCTS else (f"{a} + {b}", a + b) for i, (a, b) in enumerate(pairs)]
    text = "What is {}? Answer with the number alone."
    rows = [json.dumps({"problem": text.format(question), "answer": str(answer)}) for question, answer in problems]
    path.write_text("\n".join(rows))
    of_both = {"dataset_name": str(path), "eval_dataset_name": str(path)}
    num = NUM_SUMS + NUM_PRODUCTS
    return of_both | {"dataset_limit": num, "eval_dataset_offset": num, "eval_dataset_limit": NUM_HELD_OUT}


def read_recipe(task, changed, folder):
    """The recipe with changed settings: what a trainer and the model get, and both datasets."""
    data = write_sums(folder.with_suffix(".jsonl")) if task == SUMS else {}
    settings = yaml.safe_load(find_recipe(RECIPE).read_text()) | changed | data
    own = folder.with_suffix(".yaml")
    own.write_text(yaml.safe_dump({name: value for name, value in settings.items() if value is not None}))
    launch, args, of_model = make_parser().parse_args_and_config(["--config", str(own)])
    return settings, args, of_model, *load_datasets(launch, args)


def make_trainer(job, model, folder, trainer_class=DAPOTrainer):
    """
    Return a trainer with the settings of the recipe and the arm, or TRL's with all of them that its configuration has.
    """
    changed = {
        "output_dir": str(folder),
        "seed": job.seed,
        "eval_steps": PROBE_EVERY,
        "num_generations_eval": NUM_ANSWERS,
        "per_device_eval_batch_size": 12 * NUM_ANSWERS,
        "save_strategy": "no",
        "max_steps": NUM_ROLLOUTS,
        **job.settings,
    }
    settings, args, of_model, train_dataset, eval_dataset = read_recipe(job.task, changed, folder)
    rewards = [last_number_reward, bare_number_reward][: len(args.reward_weights)]
    if job.arm == GRPO:
        rewards.append(SoftOverlongPunishment(args.max_completion_length, args.overlong_buffer_length))
        trainer_class, args = GRPOTrainer, of_trl(settings)
    args.model_init_kwargs = {"dtype": of_model.dtype}
    return trainer_class(
        str(model),
        rewards,
        args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(of_model),
    )


def of_trl(settings):
    """
    Return a GRPOConfig with as many rows per rollout and per step, Clip-Higher, and the weight of the punishment.
    """
    known = {field.name for field in fields(GRPOConfig)}
    sizes = {"per_device_train_batch_size": NUM_ROWS // 4, "gradient_accumulation_steps": 4}
    others = {"epsilon_high": 0.28, "reward_weights": [*settings["reward_weights"], 1.0]}
    return GRPOConfig(**{name: value for name, value in settings.items() if name in known} | sizes | others)


def run(job, model, folder):
    """Train from the model; return its curve and its figures."""
    trainer = make_trainer(job, model, folder / "run", Watched if job.task == CLIP else DAPOTrainer)
    train_quietly(trainer, Stopwatch())
    log = trainer.state.log_history
    curve = curve_of(log, NUM_STEPS if job.task == CLIP else 1)
    figures = {
        "start": curve[0]["accuracy"],
        "accuracy": curve[-1]["accuracy"],
        "tokens": curve[-1]["tokens"],
        "cpu_seconds": curve[-1]["seconds"],
    }
    if job.task == CLIP:
        figures |= of_the_clip(trainer, log)
    return figures | {"curve": curve}


# ---- For two_names/: one reward, rollouts of that study's size, and probes on held-out problems ----


def prepare(task, model, folder):
    """
    Return the training prompts, the settings of LoRA, the tokenizer, and a function that measures the accuracy of a
    model.
    """
    *_, of_model, dataset, held_out = read_recipe(task, {}, folder / "recipe")
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    prompts, golds = (list(held_out[column]) * NUM_OF_TWO_NAMES for column in ("prompt", "solution"))
    asked = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    sampling = GenerationConfig(do_sample=True, top_k=0, max_length=None, max_new_tokens=MAX_LENGTH)

    def probe_model(policy):
        with without_side_effects(policy):
            ids = policy.generate(**asked.to(policy.device), generation_config=sampling)
        texts = tokenizer.batch_decode(ids[:, asked["input_ids"].size(1) :], skip_special_tokens=True)
        return {"accuracy": statistics.mean(last_number_reward(texts, golds))}

    return dataset, get_peft_config(of_model), tokenizer, probe_model


def train(job, model, folder, arm):
    """Return the curve and the mean acceptance rate, on a GPU if there is one."""
    dataset, peft_config, tokenizer, probe_model = prepare(job.task, model, folder)
    what = arm, load(model), folder, last_number_reward, dataset, tokenizer
    settings = {"use_cpu": DEVICE == "cpu"}
    _, curve, log = trainers.train(job, *what, probe_model=probe_model, settings=settings, peft_config=peft_config)
    return {"curve": curve, "acceptance": 1 - mean_of(log, "frac_reward_zero_std")}


def of_the_clip(trainer, log):
    """
    Return the entropy in the second half of the rollouts, pass@8 at the end, and the tokens that the upper clip
    stopped.
    """
    rollouts = [entry for entry in log if "reward" in entry]
    num_stopped, probability = trainer.up_clipped.tolist()
    return {
        "late entropy": mean_of(rollouts[len(rollouts) // 2 :], "entropy"),
        "pass at 8": [entry["eval_pass@8"] for entry in log if "eval_pass@8" in entry][-1],
        "upper-clip share": mean_of(rollouts, "clip_ratio/high_mean"),
        "probability of the up-clipped": probability / num_stopped if num_stopped else math.nan,
    }
