# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Completions scored a second by TRL's `accuracy_reward` and by `math_verify_reward`, and what hostile text costs.

    python -m benchmarks rewards --data dapo_math_17k.parquet    # a dataset with integer answers

Both score the same completions, made from the problems of DAPO-Math-17k: right, wrong and malformed, in groups of one
problem as in training. Each pass takes new problems, so that no gold answer is known from the pass before.
"""

import random
import statistics
import time

import psutil
from trl.rewards import accuracy_reward

from trl_dapo.data import load_math_dataset
from trl_dapo.rewards import MathVerifyReward, dapo_math_reward


# The share of each way to end a completion; {gold} is the gold answer, {wrong} another number.
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

HOSTILE = {
    "1 MB of text": "x" * 1_000_000,
    "1 MB of dollars": "answer " + "$" * 1_000_000,
    "1 MB of boxes": "\\boxed{" * 150_000,
    "100,000 nested braces": "\\boxed{" + "{" * 100_000 + "34" + "}" * 100_000 + "}",
    "2,000 nested roots": "\\boxed{" + "\\sqrt{" * 2_000 + "2" + "}" * 2_000 + "}",
    "power tower": r"\boxed{9^{9^{9^{9}}}}",
    "integral": r"\boxed{\int_0^\infty \frac{\sin(x^{x})}{x^{x^x}} dx}",
    "limit": r"\boxed{\lim_{x\to\infty} \frac{x^{x^x}}{\sin(x)^{x!}}}",
    "sum": r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k^k!}}",
    "factorial": r"\boxed{100000000!}",
    "binomial": r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    "500,000 digits": "\\boxed{" + "9" * 500_000 + "}",
    "50,000 commas": "\\boxed{" + "1," * 50_000 + "1}",
    "NUL bytes": "\\boxed{3\x004}\x00",
    "lone surrogates": "\ud800\\boxed{34\udfff}",
    "right-to-left marks": "\u202e\\boxed{34}\u202c",
    "zalgo": "\\boxed{3" + "\u0301" * 10_000 + "4}",
    "regex bomb": "final answer " * 80_000 + "is",
    "code": r"\boxed{__import__('os').abort()}",
}


def make_completions(problems, num_completions, num_generations, seed):
    """Groups of completions that talk about their problem for a while, and their gold answers."""
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
        print(f"pass {i + 1}: {latest}; {sum(theirs):.0f} of {len(texts)} right", flush=True)
    medians = {name: statistics.median(rates) for name, rates in per_second.items()}
    times = medians["math_verify_reward"] / medians["accuracy_reward"]
    print(f"median: {', '.join(f'{name} {rate:,.0f}/s' for name, rate in medians.items())}: {times:.2f} times as fast")
    print(f"same verdict: {num_same:,} of {num_verdicts:,}")
    _, seconds = timed(dapo_math_reward, conversations, golds)
    print(f"dapo_math_reward, another rule: {len(texts) / seconds:,.0f}/s")


def survive_hostile_text(timeout):
    reward = MathVerifyReward(timeout=timeout, num_workers=1)
    reward(["\\boxed{1}"], ["1"])
    num_given, longest = 0, 0.0
    for name, text in HOSTILE.items():
        (verdict,), seconds = timed(reward, [text], ["34"])
        num_given += verdict is not None
        longest = max(longest, seconds)
        print(f"  {name:<24} {verdict} after {seconds:.2f} s", flush=True)
        reward(["\\boxed{1}"], ["1"])  # a new worker, where that one was killed
    print(f"verdicts given: {num_given} of {len(HOSTILE)}; longest: {longest:.2f} s of a limit of {timeout:g} s")
    reward.close()


def main(
    data="dapo_math_17k.parquet", num_completions=2_000, num_generations=8, num_passes=3, num_workers=2, timeout=1.0
):
    reward = MathVerifyReward(num_workers=num_workers)
    _, seconds = timed(reward, ["\\boxed{1}"] * num_workers, [str(i) for i in range(num_workers)])
    print(f"{num_completions:,} completions a pass, {num_workers} workers, first verdict after {seconds:.2f} s")
    compare_speed(data, num_passes, num_completions, num_generations, reward)
    reward.close()
    print(f"\nhostile completions, limit {timeout:g} s:")
    survive_hostile_text(timeout)
    print(f"workers left over: {len(psutil.Process().children(recursive=True))}")
