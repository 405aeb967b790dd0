# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Scripted rollouts, their gradients, and jobs that the two-process tests run in each process."""

import gc
import os
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from helpers import launch, prompts, run_job, tiny_config
from tiny_models import make_model, make_tokenizer
from transformers import DistributedConfig, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from trl import GRPOTrainer

from trl_dapo import DAPOTrainer
from trl_dapo.update.phase import UpdatePhaseMixin


# Each training run collects garbage, which takes ten times as long as its steps if all objects of torch are visited.
gc.freeze()

PAD = 0  # of `make_tokenizer`


@dataclass
class Row:
    """A prompt and completion, with per-token values that a rollout may have."""

    prompt: list[int]
    completion: list[int]
    advantage: float
    tool_mask: list[int] | None = None
    old: list[float] | None = None
    image: float | None = None
    unknown: float | None = None  # a tensor that a later TRL may add to its rollouts
    ref: list[float] | None = None
    is_masked: bool = False
    is_filler: bool = False

    @property
    def loss_mask(self):
        has_no_token = self.is_masked or self.is_filler
        return [0] * len(self.completion) if has_no_token else self.tool_mask or [1] * len(self.completion)


def make_rows(num_rows, seed=0, longest=40):
    """Rows with prompts of 1 to 12 tokens and a long tail of completions."""
    draw = random.Random(seed)

    def tokens(num_tokens):
        return [draw.randint(3, 99) for _ in range(num_tokens)]

    lengths = [(draw.randint(1, 12), min(longest, 1 + int(draw.lognormvariate(2, 0.9)))) for _ in range(num_rows)]
    return [Row(tokens(prompt), tokens(completion), draw.gauss(0, 1)) for prompt, completion in lengths]


def mask(rows, indices):
    """Mask rows as overlong filtering masks completions that were cut off."""
    return [replace(row, is_masked=True) if i in indices else row for i, row in enumerate(rows)]


def fill(rows, indices):
    """Mark rows as filler, as in a rollout whose batch was not full."""
    return [replace(row, is_filler=True, advantage=0.0) if i in indices else row for i, row in enumerate(rows)]


def collate(rows):
    """
    Return a rollout as GRPOTrainer builds it: prompts padded on the left, completions on the right, to the longest.
    """
    prompt_width = max(len(row.prompt) for row in rows)
    completion_width = max(len(row.completion) for row in rows)

    def left(fill, values):
        return torch.tensor([[fill] * (prompt_width - len(value)) + value for value in values])

    def right(fill, values):
        return torch.tensor([value + [fill] * (completion_width - len(value)) for value in values])

    rollout = {
        "prompt_ids": left(PAD, [row.prompt for row in rows]),
        "prompt_mask": left(0, [[1] * len(row.prompt) for row in rows]),
        "completion_ids": right(PAD, [row.completion for row in rows]),
        "completion_mask": right(
            0, [[int(not (row.is_masked or row.is_filler))] * len(row.completion) for row in rows]
        ),
        "advantages": torch.tensor([row.advantage for row in rows]),
    }
    if rows[0].tool_mask is not None:
        rollout["tool_mask"] = right(1, [row.tool_mask for row in rows])
    if any(row.old is not None for row in rows):
        unknown = float("nan")
        rollout["old_per_token_logps"] = right(0.0, [row.old or [unknown] * len(row.completion) for row in rows])
    if rows[0].ref is not None:
        rollout["ref_per_token_logps"] = right(0.0, [row.ref for row in rows])
    if any(row.is_filler for row in rows):
        rollout["is_filler"] = torch.tensor([row.is_filler for row in rows])
    if rows[0].image is not None:
        # Two patches per row, so that images are not indexed by row: the layout of Qwen's processors.
        rollout["pixel_values"] = torch.tensor([[row.image] for row in rows for _ in range(2)])
        rollout["image_grid_thw"] = torch.tensor([[1, 1, 2]] * len(rows))
        rollout["num_images"] = [1] * len(rows)
    if rows[0].unknown is not None:
        rollout["tone"] = torch.tensor([[row.unknown] * 3 for row in rows])
    rollout["num_items_in_batch"] = torch.tensor(sum(sum(row.loss_mask) for row in rows))
    return rollout


def tiny_policy():
    """A model whose next-token distribution is far from uniform, so that the gradients of rows differ."""
    return make_model(initializer_range=0.1)


class Scripted:
    """Trains on rollouts from `script`, or samples them if there is none. Records gradients and micro-batches."""

    def __init__(self, script=None, model=None, **settings):
        defaults = {"optim": "sgd", "learning_rate": 0.0, "max_grad_norm": 0.0, "num_generations": 2, "max_steps": 1}
        self.script, self.gradients, self.microbatches, self.images, self.asked = script, [], [], [], []
        super().__init__(
            model or tiny_policy(),
            lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
            args=tiny_config("outputs/unused", **{**defaults, **settings}),
            train_dataset=prompts(64),
            eval_dataset=prompts(4),
            processing_class=make_tokenizer(),
            callbacks=[Recorder(self)],
        )

    def _generate_and_score_completions(self, inputs):
        self.asked.append([example["prompt"] for example in inputs])
        if self.script is None or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        num_rows, rank = len(inputs), self.accelerator.process_index
        everyone = self.script[: num_rows * self.accelerator.num_processes]
        self.script = self.script[len(everyone) :]
        rollout = collate(everyone[rank * num_rows : (rank + 1) * num_rows])
        rollout["num_items_in_batch"] = torch.tensor(sum(sum(row.loss_mask) for row in everyone))
        return rollout

    def _compute_loss(self, model, inputs):
        self.microbatches.append(inputs)
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        """The policy does not accept images: record which came with which row, and remove them."""
        images = {key: kwargs.pop(key, None) for key in ("pixel_values", "image_grid_thw", "num_images")}
        if images["pixel_values"] is not None:
            patches = images["pixel_values"].flatten().split([2 * number for number in images["num_images"]])
            for ids, mask_, values in zip(input_ids, attention_mask, patches, strict=True):
                self.images.append((ids[mask_.bool()].tolist(), values.tolist()))
        return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **kwargs)


class Recorder(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.trainer.gradients.append(gradient(model))


class ScriptedUpdate(Scripted, UpdatePhaseMixin):
    pass


class ScriptedGRPO(Scripted, GRPOTrainer):
    pass


class ScriptedDAPO(Scripted, DAPOTrainer):
    pass


def run(cls, script, num_microbatches, steps_per_generation=None, num_ranks=1, **settings):
    """Train on `script`. Each optimizer step takes an equal share of it."""
    if script is not None:
        num_rows = len(script) // (settings.get("max_steps", 1) * num_microbatches * num_ranks)
        settings.setdefault("per_device_train_batch_size", num_rows)
    trainer = cls(
        script,
        gradient_accumulation_steps=num_microbatches,
        steps_per_generation=steps_per_generation or num_microbatches,
        **settings,
    )
    trainer.train()
    return trainer


def gradient(model):
    """Return all gradients as one vector, with zeros for missing ones."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([getattr(grad, "full_tensor", lambda grad=grad: grad)().flatten() for grad in grads]).clone()


def reference_gradient(rows):
    """The gradient computed one row at a time, without padding, with the formula written out."""
    model = tiny_policy()
    num_tokens = sum(sum(row.loss_mask) for row in rows)
    for row in rows:
        logits = model(torch.tensor([row.prompt + row.completion])).logits[0, len(row.prompt) - 1 : -1]
        logps = logits.log_softmax(-1)[range(len(row.completion)), row.completion]
        ratio = torch.exp(logps - (logps.detach() if row.old is None else torch.tensor(row.old)))
        surrogate = torch.min(ratio * row.advantage, ratio.clamp(0.8, 1.28) * row.advantage)
        (-(surrogate * torch.tensor(row.loss_mask)).sum() / num_tokens).backward()
    return gradient(model)


def apart(one, other):
    """Distance relative to the length of `other`."""
    return ((one - other).norm() / other.norm()).item()


def padded_tokens(microbatch):
    return microbatch["prompt_ids"].numel() + microbatch["completion_ids"].numel()


def policy_with_reference(folder):
    """A policy whose reference model, with the same initial weights, is loaded from a folder."""
    model = tiny_policy()
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def logs_of(trainer):
    """Return the logs of each optimizer step."""
    return [log for log in trainer.state.log_history if "loss" in log]


def passes_without_gradient(trainer, rollout, compute=UpdatePhaseMixin._get_per_token_logps_and_entropies):
    """Return log-probabilities and entropies without gradient, and the rows and columns of each pass."""
    ids, attention = whole_rows(rollout)
    seen, num_columns = [], rollout["completion_ids"].size(1)
    hook = trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with torch.no_grad():
        options = {"batch_size": 4, "compute_entropy": True}
        logps, entropies, _ = compute(trainer, trainer.model, ids, attention, num_columns, **options)
    hook.remove()
    return logps, entropies, seen


def whole_rows(rollout):
    """Token ids and attention mask of prompts and completions together."""
    return (torch.cat([rollout[f"prompt_{kind}"], rollout[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask"))


def training(**settings):
    """A trainer in the middle of an optimizer step of one micro-batch."""
    trainer = ScriptedUpdate(gradient_accumulation_steps=1, **settings)
    trainer.current_gradient_accumulation_steps = 1  # TRL's own loss reads it
    trainer.model.train()
    return trainer


def completions_of(microbatches):
    return {
        tuple(ids[mask_.bool()].tolist())
        for microbatch in microbatches
        for ids, mask_ in zip(microbatch["completion_ids"], microbatch["completion_mask"], strict=True)
    }


ROWS = make_rows(16)
LOSSES = ["grpo", "sapo", "dr_grpo", "luspo", "bnpo", "cispo", "vespo", "dapo"]
# Parameters in which runs may differ that must give the same result.
TIMED = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
# Micro-batches per optimizer step, and how many of them one rollout fills.
SPLITS = [(1, 1), (2, 2), (4, 4), (8, 8), (4, 2), (4, 1), (8, 4)]


def old(rows, indices):
    """Return the rows in which those of `indices` have the log-probabilities of an earlier policy."""
    return [replace(row, old=[-4.0] * len(row.completion)) if i in indices else row for i, row in enumerate(rows)]


def with_unknown(rows):
    """Rollouts as a later TRL may make them, with a tensor of unknown padding. Here it is the row's number."""
    return [replace(row, unknown=float(i)) for i, row in enumerate(rows)]


# Rows of one optimizer step and their split. With two ranks, rank 0 starts with the first half of them.
CASES = {
    **{f"split {split}": (ROWS, split) for split in SPLITS},
    "a rank without a token": (mask(ROWS, range(8, 16)), (4, 4)),
    "a single token": ([Row([5, 6], [7], 1.5), *mask(ROWS[1:], range(15))], (4, 4)),
    "long rows on one rank": (sorted(ROWS, key=lambda row: -len(row.prompt) - len(row.completion)), (4, 4)),
    "one long row": ([*make_rows(15, longest=3), Row([9] * 5, list(range(3, 93)), -1.0)], (4, 4)),
    "one row a rank": (ROWS[:2], (1, 1)),
    "one long row, one micro-batch": ([*make_rows(3, longest=3), Row([9] * 5, list(range(3, 93)), -1.0)], (1, 1)),
    "old logps on one rank": (old(ROWS, range(8)), (4, 4)),
    "images on one rank": ([replace(row, image=float(i)) for i, row in enumerate(ROWS[:8])] + ROWS[8:], (4, 4)),
    "an unknown tensor on one rank": (with_unknown(ROWS[:8]) + ROWS[8:], (4, 4)),
}


def two_processes(folder, job="main"):
    """Run `CASES`, or another job, in two gloo processes. Return what each of them found."""
    result = launch(job, folder, num_processes=2, jobs=__file__)
    assert result.returncode == 0, result.stderr[-3000:]
    return [torch.load(Path(folder) / f"rank-{rank}.pt") for rank in range(2)]


# Rows, split and settings of losses other than DAPO's. Filler is on the last process, as in a rollout that is not
# full.
OTHER_LOSSES = {
    "filler, grpo": (fill(ROWS, range(6, 16)), (4, 4), {"loss_type": "grpo"}),
    "filler, dr_grpo, window of two rollouts": (fill(ROWS, range(6, 16)), (4, 2), {"loss_type": "dr_grpo"}),
    "filler, cispo": (fill(ROWS, range(6, 16)), (2, 2), {"loss_type": "cispo"}),
}

# Runs that sample: a process has one row of each optimizer step.
SAMPLED = {"one row a rank": {}, "one row a rank, no dynamic sampling": {"use_dynamic_sampling": False}}


def rows_of(microbatch):
    """Return the rows of a micro-batch without their padding."""
    columns = [microbatch[key].bool() for key in ("prompt_mask", "completion_mask")]
    return [
        Row(prompt[prompt_mask].tolist(), completion[completion_mask].tolist(), advantage.item())
        for prompt, completion, prompt_mask, completion_mask, advantage in zip(
            microbatch["prompt_ids"], microbatch["completion_ids"], *columns, microbatch["advantages"], strict=True
        )
    ]


def main(folder):
    found = {}
    for name, (rows, (num_microbatches, steps_per_generation)) in CASES.items():
        trainer = run(ScriptedUpdate, rows, num_microbatches, steps_per_generation, num_ranks=2)
        found[name] = {
            "gradient": trainer.gradients[0],
            "costs": [padded_tokens(microbatch) for microbatch in trainer.microbatches],
            "logs": {key: value for key, value in trainer.state.log_history[0].items() if key != "step_time"},
        }
    for name, (rows, split, settings) in OTHER_LOSSES.items():
        found[name] = {"gradient": run(ScriptedUpdate, rows, *split, num_ranks=2, **settings).gradients[0]}
    for name, settings in SAMPLED.items():
        trainer = run(ScriptedDAPO, None, 1, per_device_train_batch_size=1, max_completion_length=16, **settings)
        rows = [asdict(row) for microbatch in trainer.microbatches for row in rows_of(microbatch)]
        found[f"sampled, {name}"] = {"gradient": trainer.gradients[0], "rows": rows}
    torch.save(found, Path(folder) / f"rank-{os.environ['RANK']}.pt")


# Rows, split and settings of optimizer steps under a budget of tokens.
BUDGETED = {
    "a row a step of the loop": (ROWS, (8, 8), {"max_tokens_per_microbatch": 60}),
    "one step of the loop": (ROWS, (1, 1), {"max_tokens_per_microbatch": 60}),
    "fewer than the loop's": (ROWS, (8, 4), {"max_tokens_per_microbatch": 1000}),
    "all rows on one rank": (mask(ROWS, range(8, 16)), (4, 4), {"max_tokens_per_microbatch": 60}),
    "a single token": ([Row([5, 6], [7], 1.5), *mask(ROWS[1:], range(15))], (4, 4), {"max_tokens_per_microbatch": 60}),
    "no token": (mask(ROWS, range(16)), (4, 4), {"max_tokens_per_microbatch": 60}),
    "a row beyond the budget": (CASES["one long row"][0], (4, 4), {"max_tokens_per_microbatch": 30}),
    "old logps on one rank": (old(ROWS, range(8)), (8, 8), {"max_tokens_per_microbatch": 60}),
    # Without it, a rank would have one or two micro-batches of its 8 rows; with it, TRL's 8.
    "an unknown tensor on one rank": (with_unknown(ROWS[:8]) + ROWS[8:], (8, 8), {"max_tokens_per_microbatch": 1000}),
    "gradients synchronized at each micro-batch": (
        ROWS,
        (8, 8),
        {
            "max_tokens_per_microbatch": 60,
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        },
    ),
}
if hasattr(Qwen3ForCausalLM, "is_distributed_loading_by_transformers"):  # transformers 5.19
    BUDGETED["sharded at load"] = (ROWS, (8, 4), {"max_tokens_per_microbatch": 60})
EXPERTS = [Row([5, 6], [7], 1.5), *mask(ROWS[1:4], range(3))]


def tiny_experts():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{**tiny_policy().config.to_dict(), "model_type": "qwen3_moe", "architectures": None},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        router_aux_loss_coef=0.1,
        output_router_logits=True,
    )
    return Qwen3MoeForCausalLM(config)


def policy_sharded_at_load(folder):
    """The policy's weights, of which each process loads its share (transformers' own FSDP)."""
    path = Path(folder) / "policy"
    if os.environ["RANK"] == "0":
        tiny_policy().save_pretrained(path)
    torch.distributed.barrier()
    sharding = DistributedConfig(fsdp_size=2)
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=sharding)


def budgeted(folder):
    found = {}
    for name, (rows, split, settings) in BUDGETED.items():
        model = policy_sharded_at_load(folder) if name == "sharded at load" else None
        trainer = run(ScriptedUpdate, rows, *split, num_ranks=2, model=model, **settings)
        found[name] = {
            "gradient": trainer.gradients[0],
            "costs": [(len(part["advantages"]), padded_tokens(part)) for part in trainer.microbatches],
            "in_step": trainer._packer.in_step,
            "logs": {key: value for key, value in trainer.state.log_history[0].items() if key != "step_time"},
        }
    trainer = run(ScriptedUpdate, EXPERTS, 2, num_ranks=2, model=tiny_experts(), max_tokens_per_microbatch=60)
    found["experts"] = {"gradient": trainer.gradients[0], "logs": trainer.state.log_history[0]}
    torch.save(found, Path(folder) / f"rank-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    run_job(globals())
