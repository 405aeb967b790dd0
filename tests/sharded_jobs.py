# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs that the tests of sharded training run in each process."""

import os
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, is_peft_model
from helpers import ScriptedTrainer, number, prompts, right, run_job, tiny_config, untimed
from jobs import RANK, WORLD_SIZE, record_rollouts, script, vowels
from packaging.version import Version
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, TrainerCallback

from trl_dapo import DAPOTrainer
from trl_dapo.engines.lora_adapters import gather_adapter
from trl_dapo.settings.sampling_defaults import PAPER


USES_DEEPSPEED = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
USES_FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"

if USES_DEEPSPEED:
    import deepspeed

    # Compiled on first use, which takes a minute. It is only needed to reduce gradients in inference.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def config(folder, **overrides):
    settings = {"per_device_train_batch_size": 4 // WORLD_SIZE, "shuffle_dataset": False, "max_steps": 3}
    if USES_DEEPSPEED:
        # `use_cpu` would turn DeepSpeed off. Without it, the device is the CPU because there is no other.
        settings |= {"use_cpu": False, "ddp_backend": "gloo"}
    args = tiny_config(folder, **{**settings, **overrides})
    if USES_FSDP:
        # accelerate only shards over accelerators, although FSDP2 itself can shard over CPUs.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def full_weights(trainer):
    """Return all weights as one float32 vector, or `None` on the processes that do not gather them."""
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return torch.cat([weights[name].float().flatten() for name in sorted(weights)]) if weights else None


def local_moments(trainer):
    """Return how many of Adam's first moments this process holds."""
    optimizer = trainer.model_wrapped.basic_optimizer if USES_DEEPSPEED else trainer.optimizer.optimizer
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return sum((moment.to_local() if isinstance(moment, DTensor) else moment).numel() for moment in moments)


class Recorder(TrainerCallback):
    """Record the weights before the first optimizer step and after each."""

    def __init__(self, trainer):
        self.trainer, self.weights = trainer, []
        trainer.add_callback(self)

    def on_train_begin(self, args, state, control, **kwargs):
        self.weights.append(full_weights(self.trainer))

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(full_weights(self.trainer))


def train(trainer, folder, resume_from_checkpoint=None):
    recorder, rollouts, longest = Recorder(trainer), record_rollouts(trainer), []
    generate = trainer._generate_single_turn

    def spy(*args):
        completion_ids, logprobs = generate(*args)
        longest.append(max(map(len, completion_ids)))
        return completion_ids, logprobs

    trainer._generate_single_turn = spy
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    report = {
        "engine": (trainer.accelerator.distributed_type.value, trainer._dist.zero_stage, trainer._dist.fsdp_version),
        "local_moments": local_moments(trainer),
        "longest": longest,
        "rollouts": rollouts,
        "logs": untimed(trainer.state.log_history),
        "weights": recorder.weights,
    }
    if is_peft_model(trainer.model):
        report["adapter"] = gather_adapter(trainer.model, "default", trainer._dist)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(report, folder / f"report-{WORLD_SIZE}-{RANK}.pt")


def script_with_an_empty_rollout(text, i):
    return "wrong" if 4 <= number(text) < 8 else script(text, i)


# An older transformers does not support a reference model under FSDP2: see `trl_dapo/update/compat.py`.
REFERS = {} if Version(transformers.__version__) < Version("5.23") else {"beta": 0.1}
SCRIPTED = {
    "plain": {},
    "reference": REFERS,
    "carried": {"dynamic_sampling_surplus": "carry", "batch_multiplier": 1.0},
    # Three rollouts, of which the second has no accepted group.
    "empty": {**PAPER, "dynamic_sampling_max_gen_batches": 1, "weight_decay": 0.1},
    "lora": {"beta": 0.1},
    # The 8 rows of a process are 4 micro-batches without a budget.
    "more micro-batches": {"max_tokens_per_microbatch": 20},
    "fewer micro-batches": {"max_tokens_per_microbatch": 200, **REFERS},
    "carried, budget": {"dynamic_sampling_surplus": "carry", "batch_multiplier": 1.0, "max_tokens_per_microbatch": 20},
}
SCRIPTED["empty, budget"] = {**SCRIPTED["empty"], "max_tokens_per_microbatch": 20}


# Losses are TRL's mean over micro-batches, which differs between one process and two.
OTHER_LOSS = {"empty, grpo": {**SCRIPTED["empty"], "loss_type": "grpo"}}


def scripted(model, folder, runs=SCRIPTED):
    """Train on scripted completions, so that every engine and a single process train on the same rows."""
    for name, overrides in runs.items():
        args = config(Path(folder) / name / "run", **overrides)
        torch.manual_seed(0)
        trainer = ScriptedTrainer(
            model,
            right,
            args,
            train_dataset=prompts(40),
            script=script_with_an_empty_rollout if name.startswith("empty") else script,
            peft_config=LoraConfig(r=4, target_modules="all-linear") if name == "lora" else None,
        )
        train(trainer, Path(folder) / name)


def sampled(model, folder):
    """Sample with the model, then again from the second checkpoint on. Save the final model."""
    folder = Path(folder)
    settings = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_completion_length": 32,
        # pull towards the end-of-sequence token, so that lengths differ
        "generation_kwargs": {"sequence_bias": [[[1], 4.0]]},
    }
    for name, checkpoint in {"whole": None, "resumed": str(folder / "run" / "checkpoint-2")}.items():
        trainer = DAPOTrainer(model, vowels, config(folder / "run", **settings), train_dataset=prompts(40))
        train(trainer, folder / name, checkpoint)
    trainer.save_model(folder / "saved")


def depends_on_padding(model, folder):
    """Train a model with absolute positions for two optimizer steps on one rollout."""
    folder = Path(folder) / "depends on padding"
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.1, "vocab_size": len(tokenizer)}
    if RANK == 0:
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(**settings, bos_token_id=1, eos_token_id=1, pad_token_id=0)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    PartialState().wait_for_everyone()
    # With a learning rate of 0, tokens that are clipped in the second step are clipped because of padding.
    overrides = {"steps_per_generation": 8, "max_steps": 2, "disable_dropout": True, "learning_rate": 0.0}
    args = config(folder / "run", epsilon=1e-3, epsilon_high=1e-3, **overrides)
    train(ScriptedTrainer(str(folder), right, args, train_dataset=prompts(40), script=script), folder)


def scripted_and_sampled(model, folder):
    scripted(model, folder, {**SCRIPTED, **OTHER_LOSS})
    sampled(model, folder)
    depends_on_padding(model, folder)


if __name__ == "__main__":
    run_job(globals())
