# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Records what short runs of many configurations sample, train on and log, to compare them after a change of the code.

    python tests/golden_runs.py record              # all, into tests/golden/*.json
    python tests/golden_runs.py record NAME ...     # some
    python tests/golden_runs.py compare             # bit for bit, on the machine that recorded: also the weights' hash

`tests/trainer/test_golden.py` compares without the hash, and numbers only to 1e-5, since other processors round
differently. Replace a recording only with a reason in the commit message.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from helpers import ScriptedTrainer, launch, number, prompts, right, run_job, scripted, tiny_config, untimed, weights
from PIL import Image
from scripted_server import ahead_config, stand_ins, with_adapter
from tiny_models import save_image_model, save_tiny_model, save_tool_model

from trl_dapo import DAPOTrainer
from trl_dapo.settings.sampling_defaults import DEFAULTS, PAPER


RECORDINGS = Path(__file__).parent / "golden"
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# Most runs have the screen and the memory on by default: that covers more code than the package's own defaults.
BOTH_ON = {"dynamic_sampling_screen": "on", "dynamic_sampling_memory": True}
AUTO = {"dynamic_sampling_screen": "auto", "dynamic_sampling_memory": "auto"}
CARRY, DISCARD = {"dynamic_sampling_surplus": "carry"}, {"dynamic_sampling_surplus": "discard"}
TWO_STEPS = {"steps_per_generation": 8}  # per rollout
SAVED = {"save_strategy": "steps", "save_steps": 1}


# ---- Completions and rewards ----


def outcome(prompt: int, index: int) -> str:
    """
    Prompts 0, 4, ... have no correct completion. For prompts 1, 5, ... all are correct, for 2, 6, ... every second
    one, and for 3, 7, ... every fourth one.
    """
    share = (1 << 30, 1, 2, 4)[prompt % 4]
    return "right" if index % share == share - 1 else "wrong"[: 1 + (7 * prompt + index) % 5]


def in_turn():
    """A script that counts the completions of each prompt, so that their position in a round does not matter."""
    seen: Counter[int] = Counter()

    def script(text, i):
        seen[number(text)] += 1
        return outcome(number(text), seen[number(text)] - 1)

    return script


def by_place(text, i):
    """The same by the position among the rows of all processes, which is all that one of several processes knows."""
    return outcome(number(text), i)


def rarely_mixed(text, i):
    """For one prompt in ten, every second completion is correct. The others have no correct completion."""
    return "right" if number(text) % 10 == 0 and i % 2 else "wrong"


def polite(completions, **kwargs):
    return [0.5] * len(completions)


def length(completions, **kwargs):
    return [len(completion) / 10 for completion in completions]


def rank_in_group(completions, **kwargs):
    """Count the shorter completions: a reward that compares the completions of a group."""
    return [float(sum(len(other) < len(one) for other in completions)) for one in completions]


def keep_early(rewards, rows):
    return None if len(set(rewards["right"])) > 1 and number(rows[0]["prompt"]) < 30 else "late"


# ---- One run ----


def numbers_of(texts: list[str]) -> list[list[int]]:
    """Return the numbers of the prompts in order, with equal neighbors as [number, how often]."""
    found: list[list[int]] = []
    for text in texts:
        if found and found[-1][0] == number(text):
            found[-1][1] += 1
        else:
            found.append([number(text), 1])
    return found


def watch(trainer):
    """Record the rows of each rollout that reach the update, in order: prompt, completion, advantage."""
    rollouts, generate = [], trainer._generate_and_score_completions

    def spy(inputs):
        rollout = generate(inputs)
        if trainer.model.training:
            live = rollout["completion_mask"].sum(1) > 0
            columns = [rollout[name][live].tolist() for name in ("prompt_ids", "completion_ids", "advantages")]
            decode = trainer._tokenizer.decode
            rollouts.append(
                [
                    [decode(p, skip_special_tokens=True), decode(c, skip_special_tokens=True), round(a, 5)]
                    for p, c, a in zip(*columns, strict=True)
                ]
            )
        return rollout

    trainer._generate_and_score_completions = spy
    return rollouts


def record(trainer, resume_from=None) -> dict:
    rollouts = watch(trainer)
    trainer.train(resume_from_checkpoint=resume_from)
    values = weights(trainer)
    return {
        "sampled": numbers_of(getattr(trainer, "sampled", [])),
        "trained": rollouts,
        "logs": [
            {name: value for name, value in log.items() if value == value}
            for log in untimed(trainer.state.log_history)
        ],
        "weights": {"sum": values.double().sum().item(), "norm": values.double().norm().item()},
        "hash": hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16],
    }


def settings_of(folder: Path, **settings):
    """Settings of 4 prompts x 4 completions per rollout and 4 steps, by default."""
    sizes = {"per_device_train_batch_size": 4 // WORLD_SIZE, "max_steps": 4, "shuffle_dataset": False}
    return tiny_config(folder, **{**sizes, **settings})


def run(models, folder, reward_funcs=right, dataset=None, script=None, group_filter=None, **settings) -> dict:
    args, dataset = settings_of(folder / "run", **settings), dataset or prompts(40)
    data = {"train_dataset": dataset, "script": script or in_turn(), "group_filter": group_filter}
    return record(ScriptedTrainer(models["tiny"], reward_funcs, args, **data))


def resumed(models, folder, at=1, then=None, **settings) -> dict:
    """Run until a checkpoint, and continue in another process. Only the second part is recorded."""
    settings = {**SAVED, **settings}
    data = {"train_dataset": prompts(40), "script": by_place}
    stopped = settings_of(folder / "run", **settings)
    stopped.max_steps = at
    ScriptedTrainer(models["tiny"], right, stopped, **data).train()
    args = settings_of(folder / "run", **settings, **(then or {}))
    again = ScriptedTrainer(models["tiny"], right, args, **data)
    return record(again, str(folder / "run" / f"checkpoint-{at}"))


def with_memory_of_an_earlier_run(models, folder, **settings) -> dict:
    run(models, folder / "earlier", save_strategy="steps", save_steps=4)
    return run(models, folder, dynamic_sampling_memory=str(folder / "earlier" / "run"), **settings)


def with_tools(models, folder, **settings) -> dict:
    def double(number: int) -> int:
        """
        Doubles a number.

        Args:
            number: The number.
        """
        return 2 * number

    def script(text, i):
        asked = int(text.split("double ")[1].split(".")[0])
        if "<tool_response>" not in text.split("double ")[1]:
            call = f'{{"name": "double", "arguments": {{"number": {asked}}}}}'
            return f"<tool_call>\n{call}\n</tool_call><|im_end|>"
        return f"{2 * asked if asked % 3 and i % 4 == 0 else 'none'}<|im_end|>"

    def answered(completions, solution, **kwargs):
        return [float(x[-1]["content"].strip() == s) for x, s in zip(completions, solution, strict=True)]

    questions = [[{"role": "user", "content": f"double {i}."}] for i in range(24)]
    dataset = Dataset.from_dict({"prompt": questions, "solution": [str(2 * i) for i in range(24)]})
    args = settings_of(folder / "run", max_steps=2, max_completion_length=256, **settings)
    trainer = scripted(DAPOTrainer, script)(models["tool"], answered, args, train_dataset=dataset, tools=[double])
    return record(trainer)


def with_images(models, folder, **settings) -> dict:
    def script(text, i):
        return ("right" if int(text.split("prompt ")[1].split(":")[0]) % 3 and i % 4 == 0 else "wrong") + "<eos>"

    def is_correct(completions, **kwargs):
        return [float(completion[0]["content"] == "right") for completion in completions]

    messages = [[{"role": "user", "content": f"prompt {i}:"}] for i in range(24)]
    images = [Image.fromarray(np.full((8, 8, 3), 10 * i, dtype=np.uint8)) for i in range(24)]
    dataset = Dataset.from_dict({"prompt": messages, "image": images})
    args = settings_of(folder / "run", max_steps=2, **settings)
    return record(scripted(DAPOTrainer, script)(models["image"], is_correct, args, train_dataset=dataset))


def ahead(models, folder, **settings) -> dict:
    """Run with a stand-in for vLLM's server. Its requests are recorded too, in order."""
    settings = {"per_device_train_batch_size": 4 // WORLD_SIZE, **settings}
    make = with_adapter if settings.get("rollouts_ahead") == 2 else str
    with stand_ins(models["tiny"]) as clients:
        args = ahead_config(folder / "run", vllm_server_base_url="http://gpu-7:8000", **settings)
        data = prompts(200, id=range(200))
        found = record(DAPOTrainer(make(models["tiny"]), right, args, train_dataset=data))
        # Requests of several threads arrive in any order.
        return {**found, "sampled": sorted(clients[0].asked) if clients else []}


def one_process_of_two(models, folder, name):
    with defaults_of(name):
        found = TWO_PROCESSES[name](json.loads(models), Path(folder))
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found))


def in_two_processes(models, folder, name: str) -> dict:
    """Run the same configuration in two processes, and record the rows and samples of both."""
    result = launch("one_process_of_two", json.dumps(models), folder, name, num_processes=2, jobs="golden_runs.py")
    if result.returncode != 0:
        raise RuntimeError(result.stderr[-3000:])
    one, two = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    both = [first + second for first, second in zip(one["trained"], two["trained"], strict=True)]
    return {**one, "trained": both, "sampled": [one["sampled"], two["sampled"]]}


# ---- The configurations ----


def case(function=run, **settings):
    return lambda models, folder: function(models, folder, **settings)


CASES = {
    "default": case(),
    "default_shuffled": case(shuffle_dataset=True, dataset=prompts(12), max_steps=6),
    "default_iterable": case(dataset=prompts(40).to_iterable_dataset()),
    "both_on": case(),
    "both_on_shuffled": case(shuffle_dataset=True, dataset=prompts(12), max_steps=6),
    "both_on_iterable": case(dataset=prompts(40).to_iterable_dataset()),
    "paper": case(dynamic_sampling_mode="paper"),
    "discard": case(**DISCARD),
    "screen_off": case(dynamic_sampling_screen="off"),
    "screen_2": case(dynamic_sampling_screen="2"),
    "screen_3": case(dynamic_sampling_screen="3", dynamic_sampling_memory=False),
    "screen_2_discard": case(dynamic_sampling_screen="2", **DISCARD),
    "auto": case(**AUTO),
    "auto_switched_on": case(**AUTO, script=rarely_mixed, dataset=prompts(200), max_steps=6),
    "memory_off": case(dynamic_sampling_memory=False),
    "memory_two_passes": case(dataset=prompts(12), max_steps=8),
    "memory_of_a_run": case(with_memory_of_an_earlier_run),
    "carry_alone": case(**PAPER | CARRY, batch_multiplier=1.0),
    "mask": case(dynamic_sampling_mode="mask"),
    "mask_with_memory": case(dynamic_sampling_mode="mask", dynamic_sampling_memory=True, dataset=prompts(12)),
    "replace": case(dynamic_sampling_mode="replace"),
    "replace_half": case(dynamic_sampling_mode="replace", min_replace_ratio=0.5, dynamic_sampling_screen="off"),
    "budget_1": case(dynamic_sampling_max_gen_batches=1),
    "budget_2.5": case(dynamic_sampling_max_gen_batches=2.5, dynamic_sampling_screen="2"),
    "no_limit": case(dynamic_sampling_max_gen_batches=0),
    "batch_multiplier": case(batch_multiplier=0.75),
    "round_size_2": case(dynamic_sampling_max_round_size=2),
    "accuracy_band": case(dynamic_sampling_min_accuracy=0.3, dynamic_sampling_max_accuracy=0.9),
    "two_rewards": case(reward_funcs=[right, polite]),
    "two_rewards_one_named": case(reward_funcs=[right, length], dynamic_sampling_rewards=["right"]),
    "reward_compares": case(reward_funcs=[right, rank_in_group], dynamic_sampling_rewards=["right"]),
    "group_filter": case(group_filter=keep_early),
    "overlong": case(overlong_buffer_length=3, overlong_filtering=True, max_completion_length=5),
    "reward_scaling": case(reward_scaling=[0.0, 1.0, -1.0, 1.0]),
    "grpo_loss": case(loss_type="grpo"),
    "two_steps": case(**TWO_STEPS),
    "two_iterations": case(num_iterations=2, beta=0.01),
    "sampling_off": case(use_dynamic_sampling=False),
    "tools": case(with_tools),
    "images": case(with_images),
    "resumed": case(resumed, at=2),
    "resumed_in_a_rollout": case(resumed, at=1, **TWO_STEPS),
    "resumed_with_screen_2": case(resumed, at=2, dynamic_sampling_screen="2"),
    "resumed_with_another_screen": case(
        resumed, at=2, dynamic_sampling_screen="2", then={"learning_rate": 2e-3, "epsilon_high": 0.3}
    ),
    "ahead_1": case(ahead),
    "ahead_1_screened": case(ahead, batch_multiplier=None, dynamic_sampling_screen="2"),
    "ahead_2": case(ahead, rollouts_ahead=2, batch_multiplier=None, learning_rate=3e-2),
}
TWO_PROCESSES = {
    "two_default": case(script=by_place),
    "two_both_on": case(script=by_place),
    "two_paper": case(script=by_place, dynamic_sampling_mode="paper"),
    "two_auto_switched_on": case(**AUTO, script=rarely_mixed, dataset=prompts(200), max_steps=6),
    "two_screen_2": case(script=by_place, dynamic_sampling_screen="2"),
    "two_reward_compares": case(
        script=by_place, reward_funcs=[right, rank_in_group], dynamic_sampling_rewards=["right"]
    ),
    "two_budget_1": case(script=by_place, dynamic_sampling_max_gen_batches=1),
    "two_resumed": case(resumed, at=2),
    "two_ahead_2": case(ahead, rollouts_ahead=2, batch_multiplier=None, learning_rate=3e-2),
}
NAMES = [*CASES, *TWO_PROCESSES]


def defaults_of(name: str):
    """The defaults of screen and memory in a run: those of the package, or both on."""
    return patch.dict(DEFAULTS, {} if "default" in name else BOTH_ON)


def make_models(folder: Path) -> dict[str, str]:
    makers = {"tiny": save_tiny_model, "tool": save_tool_model, "image": save_image_model}
    return {name: str(save(folder / name)) for name, save in makers.items()}


def run_case(name: str, models: dict[str, str], folder: Path) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with defaults_of(name):
        found = CASES[name](models, folder) if name in CASES else in_two_processes(models, folder, name)
    return json.loads(json.dumps(found))  # in the form in which it is read again


def file_of(name: str) -> Path:
    return RECORDINGS / f"{name}.json"


def write(name: str, found: dict) -> None:
    """Write one line per log entry and per rollout, so that a diff shows which ones changed."""
    parts = []
    for key, value in found.items():
        if key in ("logs", "trained"):
            text = "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"
        else:
            text = json.dumps(value)
        parts.append(f"{json.dumps(key)}: {text}")
    file_of(name).write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> int:
    if sys.argv[1] == "one_process_of_two":
        run_job({"one_process_of_two": one_process_of_two})
        return 0
    differing = []
    with tempfile.TemporaryDirectory() as temporary:
        models = make_models(Path(temporary) / "models")
        for name in sys.argv[2:] or NAMES:
            folder = Path(temporary) / name
            folder.mkdir()
            found = run_case(name, models, folder)
            shutil.rmtree(folder)
            if sys.argv[1] == "record":
                write(name, found)
            elif found != (expected := json.loads(file_of(name).read_text())):
                differing.append(name)
                print(name, "differs in", [key for key in expected if found.get(key) != expected[key]], flush=True)
    return len(differing)


if __name__ == "__main__":
    sys.exit(main())
