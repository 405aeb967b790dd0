# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs that the vLLM tests run in processes of their own: `python vllm_jobs.py JOB ARGS`.

Each run reports how far the log-probabilities that vLLM returned are from those of the trainer's present weights. That
a run ends proves nothing, since it would also end with an engine that never gets an update.
"""

import contextlib
import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import trl.generation.vllm_generation
import vllm
import vllm.model_executor.layers.utils
from helpers import errors_of_old_logps, letters, number, prompts, tiny_config, watch_training
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback
from vllm.distributed import cleanup_dist_env_and_memory

from trl_dapo import DAPOTrainer
from trl_dapo.cli import main
from trl_dapo.engines.lora_sync import AdapterGeneration


TEMPERATURE = 0.9
WEIGHTS = "importance_sampling_ratio"


def leave_unpacked(layer, remove_weight):
    """Keep a layer's weight in a place where TRL's sync finds it. vLLM's own function packs it for the CPU."""
    layer.cpu_linear = torch.nn.functional.linear


# All that differs from a GPU. TRL's sync and vLLM's loading run unchanged. TRL passes no dtype, and vLLM's "auto"
# turns float32 into bfloat16, whose rounding would hide weights that are only a little stale.
vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = leave_unpacked
vllm.LLM = partial(vllm.LLM, dtype="float32")
trl.generation.vllm_generation.LLM = vllm.LLM


def lora_config(**overrides):
    return LoraConfig(**{"r": 8, "lora_alpha": 64, "target_modules": "all-linear", **overrides})


def make_trainer(model, folder, *, lora=None, quantized=False, **overrides):
    settings = {
        "use_vllm": True,
        "vllm_max_model_length": 128,
        "temperature": TEMPERATURE,
        "learning_rate": 1e-2,  # every step changes the weights by far more than rounding does
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "max_steps": 3,
    }
    args = tiny_config(folder / "run", **{**settings, **overrides})
    options = {"eval_dataset": prompts(5) if "eval_strategy" in overrides else None}
    if lora is not None:
        options["peft_config"] = lora_config(**lora)
    if quantized:
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return DAPOTrainer(model, letters, args, train_dataset=prompts(200), **options)


def base_weights(trainer):
    """Return the weights of the base model, bit for bit."""
    return {
        name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters() if "lora_" not in name
    }


class ServedModel:
    """
    Return the model that vLLM serves: the base as in its checkpoint, unlike that of a quantized trainer, with the
    present adapter.
    """

    def __init__(self, trainer):
        self.live = trainer.model
        base = AutoModelForCausalLM.from_pretrained(trainer.model.name_or_path, dtype=torch.float32)
        self.model = get_peft_model(base, trainer.model.peft_config["default"])

    def __call__(self, ids):
        weights = self.live.state_dict()
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(weights[name])
        return self.model(ids)


class Observer:
    """Record what vLLM returned at every call, and what became of it."""

    def __init__(self, trainer, policy=None):
        self.trainer = trainer
        self.policy = trainer.model if policy is None else policy
        self.calls, self.trained, self.num_syncs = [], [], Counter()
        self.sampled = {}  # step and log-probabilities of every completion
        engine = trainer.vllm_generation
        self.generate, self.sync_weights = engine.generate, engine.sync_weights
        engine.generate, engine.sync_weights = self.on_generate, self.on_sync
        watch_training(trainer, self.on_loss)

    @property
    def step(self):
        return self.trainer.state.global_step

    def on_sync(self):
        self.num_syncs[self.step] += 1
        self.sync_weights()

    def on_generate(self, prompts, *args, **kwargs):
        output = self.generate(prompts, *args, **kwargs)
        errors = []
        for prompt, completion, tops in zip(prompts, *output[1:3], strict=True):
            logprobs = torch.tensor([top[0] for top in tops])
            self.sampled[(*prompt,), (*completion,)] = self.step, logprobs
            errors.append((logprobs - self.live_logprobs(prompt, completion, self.policy)).abs().max().item())
        training = self.trainer.model.training
        call = {"step": self.step, "num_rows": len(prompts), "error": max(errors), "training": training}
        self.calls.append({**call, "adapter": self.trainer.vllm_generation.adapter_version})
        return output

    @torch.no_grad()
    def live_logprobs(self, prompt, completion, policy):
        completion = torch.tensor([*completion])
        ids = torch.cat([torch.tensor([*prompt]), completion])
        logits = policy(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        return logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]

    def on_loss(self, inputs):
        columns = [inputs[f"{part}_{kind}"] for part in ("prompt", "completion") for kind in ("ids", "mask")]
        rows, live = zip(*columns, strict=True), self.trainer.model
        for i, (prompt, prompt_mask, completion, mask) in enumerate(rows):
            if not mask.any():
                continue
            prompt, completion = prompt[prompt_mask.bool()].tolist(), completion[mask.bool()].tolist()
            step, logprobs = self.sampled[(*prompt,), (*completion,)]
            old, weights = (inputs[name][i, : len(completion)] for name in ("old_per_token_logps", WEIGHTS))
            self.trained.append(
                {
                    "step": self.step,
                    "sampled_in": step,
                    "old_from_sampled": (old - logprobs).abs().max().item(),
                    "old_from_live": (old - self.live_logprobs(prompt, completion, live)).abs().max().item(),
                    "weight_error": (weights - (old - logprobs).exp().clamp(max=2.0)).abs().max().item(),
                }
            )

    def report(self):
        evaluations = [log for log in self.trainer.state.log_history if "eval_reward" in log]
        syncs = dict(self.num_syncs)
        return {"calls": self.calls, "trained": self.trained, "num_syncs": syncs, "evaluations": evaluations}


def train(model, folder, *, sabotage=None, **settings):
    """Make one run. `sabotage` keeps vLLM's weights from being updated."""
    trainer = make_trainer(model, folder, **settings)
    engine = trainer.vllm_generation
    if sabotage == "no sync":
        engine.sync_weights = lambda: None
    observer = Observer(trainer, ServedModel(trainer) if settings.get("quantized") else None)
    before = base_weights(trainer)
    trainer.train()
    shut_down(trainer)
    after = base_weights(trainer)
    report = {
        "serves_adapter": engine.serves_adapter,
        "served": trainer.vllm_mode == "server" and seen_by(engine.vllm_client),
        "base_moved": [name for name, weight in before.items() if not torch.equal(weight, after[name])],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(observer.report() | report))


def refuses(model, folder, variants):
    """Return the error or the way of sending weights when a trainer is created, per variant."""
    report = {}
    save_next = AdapterGeneration._save_next

    def save_elsewhere(engine, state_dict):
        """As if the folder were mounted under different paths here and on the server."""
        name, path = save_next(engine, state_dict)
        return name, Path("/elsewhere") / path.name

    for name, settings in json.loads(variants).items():
        sabotage = settings.pop("sabotage", None)
        if sabotage == "another mount":
            AdapterGeneration._save_next = save_elsewhere
        try:
            trainer = make_trainer(model, Path(folder) / name, **settings)
            report[name] = ["made", trainer.vllm_generation.serves_adapter]
        except Exception as error:
            report[name] = [type(error).__name__, str(error)]
        AdapterGeneration._save_next = save_next
    (Path(folder) / "report.json").write_text(json.dumps(report))


def seen_by(client):
    """Return what the server serves, whether it reports its id, and whether there is a group for weights."""
    models = [model["id"] for model in client._get(f"{client.base_url}/v1/models")["data"]]
    return {"models": models, "names_itself": client._instance_name() is not None, "group": client.communicator}


def shut_down(trainer):
    if trainer.vllm_mode == "colocate":
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def runs(folder, variants):
    for name, settings in json.loads(variants).items():
        train(folder=Path(folder) / name, **settings)


# ---- One rollout ahead ----

AHEAD = {"rollouts_ahead": 1, "dynamic_sampling_surplus": "carry", "batch_multiplier": 1.75}


def ahead_run(model, folder, settings):
    """
    Train in each process of a launch. Report how far old log-probabilities are from those at the time of sampling.
    """
    trainer = make_trainer(model, Path(folder), **AHEAD, **json.loads(settings))
    errors = errors_of_old_logps(trainer, model, TEMPERATURE)
    trainer.train()
    rows = [[step, age, max(found)] for (step, age), found in errors.items()]
    (Path(folder) / f"ahead-{trainer.accelerator.process_index}.json").write_text(json.dumps(rows))


class StopOnSave(TrainerCallback):
    """End a run as Ctrl-C does, once it has saved a step."""

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == args.max_steps // 2:
            raise KeyboardInterrupt


def two_ahead_and_resumed(model, folder, settings):
    """Make a run two rollouts ahead, interrupt and continue it. Report which adapter sampled each row."""
    folder, snapshots, found, trained = Path(folder), {}, [], []
    saves = {"rollouts_ahead": 2, "dynamic_sampling_surplus": "carry", "save_strategy": "steps", "save_steps": 1}
    for resume in (None, True):
        trainer = make_trainer(model, folder, **saves, **json.loads(settings))
        errors = errors_of_old_logps(trainer, model, TEMPERATURE, snapshots)
        build = trainer._build_training_batch

        def noting(sampler, batch, build=build):
            trained.extend(number(group.rows[0].prompt) for group in batch.train)
            return build(sampler, batch)

        trainer._build_training_batch = noting
        if resume is None:
            trainer.add_callback(StopOnSave())
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=resume)
        found += [[step, age, max(values), len(values)] for (step, age), values in errors.items()]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    (folder / "report.json").write_text(json.dumps({"errors": found, "trained": trained, "logs": logs}))


def evaluates(*arguments):
    sys.exit(main([*arguments]))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
