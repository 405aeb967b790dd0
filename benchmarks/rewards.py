# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Completions per second that TRL's `accuracy_reward` and `math_verify_reward` score.

    python -m benchmarks rewards --data dapo_math_17k.parquet    # a dataset with integer answers

Both score the same completions, made from the problems of DAPO-Math-17k: correct, incorrect and malformed, in groups
of one problem as in training. Each pass takes new problems, so that no gold answer is known from the previous pass.
"""

import random
import statistics
import time

from trl.rewards import accuracy_reward

from trl_dapo.data import load_math_dataset
from trl_dapo.rewards import MathVerifyReward


# The share of each way to end a completion. {gold} is the gold answer, {wrong} another number.
ENDINGS = {
    "So the answer is $\\boxed{{{gold}}}$.": 0.35,
    "Answer: ${gold}$": 0.05,
    "So the answer is $\\boxed{{{wrong}}}$.": 0.25,
    "So the answer is $\\boxed{{\\frac{{{wrong}}}{{2}} + {gold}}}$.": 0.10,
    "So the answer is $\\boxed{{{gold}": 0.05,
    "So the answer is $\\boxed{{}}$.": 0.05,
    "Answer: {gold}": 0.05,
    "Wait, that": 0.10,
}


def make_completions(problems, num_completions, num_generations, seed):
    """Return groups of completions that talk about their problem for a while, and their gold answers."""
    rng = random.Random(seed)
    texts, golds = [], []
    while len(texts) < num_completions:
        row = problems[len(texts) // num_generations]
        problem, _, _ = row["prompt"][0]["content"].rpartition("\n\n")  # without the request for a box
        gold = row["solution"]
        for _ in range(min(num_generations, num_completions - len(texts))):
            steps = [
                f"From that $x_{i} = \\frac{{{rng.randrange(99)}}}{{{i + 1}}}$." for i in range(rng.randrange(40))
            ]
            (ending,) = rng.choices(list(ENDINGS), list(ENDINGS.values()))
            ending = ending.format(gold=gold, wrong=int(gold) + rng.randrange(1, 99))
            texts.append("\n".join([problem, *steps, ending]))
            golds.append(gold)
    return texts, golds


def timed(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - start


def compare_speed(data, num_passes, num_completions, num_generations, reward):
    num_problems = -(-num_completions // num_generations)
    problems = load_math_dataset(data, limit=num_passes * num_problems, prompt_style="boxed").to_list()
    per_second = {"accuracy_reward": [], "math_verify_reward": []}
    num_same = num_verdicts = 0
    for i in range(num_passes):
        texts, golds = make_completions(problems[i * num_problems :], num_completions, num_generations, seed=i)
        conversations = [[{"role": "assistant", "content": text}] for text in texts]
        theirs, their_seconds = timed(accuracy_reward, conversations, golds)
        ours, our_seconds = timed(reward, conversations, golds)
        for name, seconds in zip(per_second, (their_seconds, our_seconds), strict=True):
            per_second[name].append(len(texts) / seconds)
        num_verdicts += sum(verdict is not None for verdict in theirs)
        num_same += sum(a == b for a, b in zip(theirs, ours, strict=True) if a is not None)
        latest = ", ".join(f"{name} {rates[-1]:,.0f}/s" for name, rates in per_second.items())
        print(f"pass {i + 1}: {latest}; {sum(theirs):.0f} of {len(texts)} correct", flush=True)
    medians = {name: statistics.median(rates) for name, rates in per_second.items()}
    times = medians["math_verify_reward"] / medians["accuracy_reward"]
    print(f"median: {', '.join(f'{name} {rate:,.0f}/s' for name, rate in medians.items())}: {times:.2f} times as fast")
    print(f"same verdict: {num_same:,} of {num_verdicts:,}")


def main(data="dapo_math_17k.parquet", num_completions=2_000, num_generations=8, num_passes=3, num_workers=2):
    reward = MathVerifyReward(num_workers=num_workers)
    _, seconds = timed(reward, ["\\boxed{1}"] * num_workers, [str(i) for i in range(num_workers)])
    print(f"{num_completions:,} completions per pass, {num_workers} workers, first verdict after {seconds:.2f} s")
    compare_speed(data, num_passes, num_completions, num_generations, reward)
    reward.close()
