# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Cost of the ledger: bytes on disk and CPU seconds.

    python -m benchmarks ledger

The first rollouts are scripted, with values and lengths without a pattern that could be compressed. Then follows the
quickstart, which has the shortest rollouts, for the ledger's share of their time.
"""

import random
import statistics
import tempfile
from pathlib import Path
from unittest import mock

import torch
from datasets import Dataset
from rich.console import Console

from trl_dapo import trainer
from trl_dapo.cli.quickstart import run_quickstart
from trl_dapo.rewards.task_reward import TaskReward
from trl_dapo.run.ledger import Ledger, Parts, describe_groups, read_ledger
from trl_dapo.sampling.groups import GenerationRequest
from trl_dapo.sampling.policies import Decisions
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.sampler import Sampler

from .frame.runs import clock
from .frame.tables import markdown
from .sampling_policies import receive


NAMES = ["right", "soft_overlong_punishment"]
# Groups, completions per group, longest completion, groups whose text is kept.
SIZES = [(64, 8, 512, 0), (1024, 16, 20_480, 0), (1024, 16, 20_480, 4)]


def write(folder: Path, size: tuple[int, int, int, int], num_rollouts: int) -> tuple[float, list[float]]:
    """Write rollouts of a size; return the bytes per group and the CPU seconds of each rollout."""
    num_groups, G, longest, num_texts = size
    draw, num_rows = random.Random(0), num_groups * G
    torch.manual_seed(0)
    stream = PromptStream(Dataset.from_dict({"prompt": ["a"] * num_groups, "id": list(range(num_groups))}), seed=0)
    sampler = Sampler(stream, target=num_groups // 2, num_generations=G)
    task = TaskReward.choose(NAMES, torch.ones(2), None)
    parts, seconds = Parts(folder / "rollouts"), []
    parts.begin(0)
    for step in range(num_rollouts):
        sampler.start_rollout(step)
        names = [f"{draw.getrandbits(64):016x}" for _ in range(num_groups)]
        penalties_B = -torch.rand(num_rows) * (torch.rand(num_rows) < 0.2)
        rewards_BF = torch.stack([torch.randint(2, (num_rows,)).float(), penalties_B], dim=1)
        lengths_B = torch.randint(1, longest + 1, (num_rows,))
        truncated_B = lengths_B > 0.9 * longest
        groups = [sampler.queue.draw(name, {"source": "math_dapo"}, (step, i)) for i, name in enumerate(names)]
        requests = [GenerationRequest(group, G, weights_rollout=sampler.rollout.number) for group in groups]
        sampler.queue.send(requests)
        sampler.add(receive(requests, rewards_BF, lengths_B, truncated_B))
        sampler.record_decisions(Decisions(groups, [None if i % 2 else "all_wrong" for i in range(num_groups)], 0))
        words = [str(number) for number in range(2000)]
        texts = {
            group: ("What is it?", [" ".join(draw.choices(words, k=longest // 4)) for _ in range(G)])
            for group in groups[:num_texts]
        }
        with clock(seconds):
            parts.append(describe_groups(sampler.rollout, sampler.finish_rollout(), step, task, NAMES, texts))
    on_disk = sum(path.stat().st_size for path in parts.folder.iterdir())
    return on_disk / (num_rollouts * num_groups), seconds


def timed(owner: type, name: str, seconds: list[float]):
    """A block in which the CPU seconds of each call of a method are collected."""
    return mock.patch.object(owner, name, clock(seconds)(getattr(owner, name)))


def main(num_rollouts=10, num_steps=40):
    torch.set_num_threads(1)
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            on_disk, seconds = write(Path(folder), size, num_rollouts)
        num_groups, G, longest, num_texts = size
        milliseconds = 1000 * statistics.median(seconds)
        rows.append((f"{num_groups:,} x {G}, {longest:,}", num_texts, f"{on_disk:,.0f}", f"{milliseconds:.1f}"))
    sizes = "groups x completions, tokens", "groups whose text is kept"
    print("\n".join(markdown((*sizes, "bytes per group", "CPU milliseconds per rollout"), rows)))
    ledger, rollout = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        timed(Ledger, "add_groups", ledger),
        timed(Ledger, "end_rollout", ledger),
        timed(trainer.DAPOTrainer, "_generate_and_score_completions", rollout),
    ):
        run_quickstart(folder, num_warm_up_steps=100, num_steps=num_steps, console=Console(quiet=True))
        num_groups = read_ledger(Path(folder) / "dapo").num_rows
    of_ledger, of_rollout = (1000 * sum(seconds) / len(rollout) for seconds in (ledger, rollout))
    print(
        f"\nQuickstart, {len(rollout)} rollouts of {num_groups / len(rollout):.0f} groups, 4 of them with their text: "
        f"{of_ledger:.1f} ms of {of_rollout:.0f} ms per rollout, {of_ledger / of_rollout:.2%}"
    )
