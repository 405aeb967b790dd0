# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds, by hand."""

import dataclasses
import math

import pytest
from plan_helpers import SMALL

from trl_dapo.plan import rollout
from trl_dapo.plan.planning import find_shape
from trl_dapo.plan.recipe import GPU, GPUS
from trl_dapo.plan.rollout import Engine, Lengths, expected_rounds, sampling_seconds, training_flops
from trl_dapo.update.microbatches import MAX_PADDING_SHARE


pytestmark = pytest.mark.fast


# 8 bytes/s of which 5.6 are reached, 100 operations/s of which 50 and 31 are.
TOY = GPU("toy", memory=1e6, flops=100.0, bandwidth=8.0, link=10.0)


def toy_engine(**overrides) -> Engine:
    sizes = {"num_gpus": 1, "num_engines": 1, "cache_tokens": 1e9, "max_num_seqs": 1000, "step_seconds": 0.0}
    return Engine(TOY, **{**sizes, **overrides})


def test_lengths_are_flat_where_the_mean_is_half_of_the_longest_and_fall_where_it_is_less():
    flat = Lengths(50, 100)
    assert flat.survival(0.25) == pytest.approx(0.75)
    assert flat.mean_square == pytest.approx(100**2 / 3, rel=1e-3)
    # r = 2: the mean is 1 / 2 - 1 / (e^2 - 1) = 0.343482 of the longest.
    steep = Lengths(34.3482, 100)
    assert steep.rate == pytest.approx(2, abs=1e-4)
    assert steep.survival(0.5) == pytest.approx((math.exp(-1) - math.exp(-2)) / (1 - math.exp(-2)), abs=1e-5)
    # 2 / r^2 - (1 + 2 / r) / (e^r - 1) of the longest squared.
    assert steep.mean_square == pytest.approx(1e4 * (0.5 - 2 / math.expm1(2)), rel=1e-3)


def test_a_decoding_step_reads_weights_and_cache_or_computes_whichever_takes_longer():
    # 680 bytes of weights and 2 x 10 x 24 of cache; 2 x 2 x 292 operations.
    assert rollout.decode_step_seconds(SMALL, toy_engine(), 2, 10) == pytest.approx((680 + 480) / 5.6)
    # 100 sequences without context: 2 x 292 x 100 operations at 50 a second.
    assert rollout.decode_step_seconds(SMALL, toy_engine(), 100, 0) == pytest.approx(584 * 100 / 50)
    slower = toy_engine(step_seconds=3.0)
    assert rollout.decode_step_seconds(SMALL, slower, 100, 0) == pytest.approx(584 * 100 / 50 + 3)
    # On two GPUs half of the weights each, and all of the one key head; twice 2 layers of 2 x 2 x 4 bytes at 7 a
    # second, and 15 microseconds.
    shared = rollout.decode_step_seconds(SMALL, toy_engine(num_gpus=2), 2, 10)
    assert shared == pytest.approx((340 + 480) / 5.6 + 2 * 2 * (2 * 2 * 2 * 4 / 7 + 15e-6))


def test_completions_that_wait_keep_an_engine_full_and_the_longest_end_it():
    # Nothing but 1 s a step counts: 30 of 40 wait, 10 run, each of 8 tokens in the mean. Then 16 steps to the end.
    shape = dataclasses.replace(SMALL, num_layers=1, vocab_size=0, intermediate_size=0, head_dim=0)
    shape = dataclasses.replace(shape, hidden_size=1, is_tied=True)
    engine = toy_engine(max_num_seqs=10, step_seconds=1.0)
    quick = dataclasses.replace(TOY, flops=1e12, bandwidth=1e12)
    seconds, tail = sampling_seconds(shape, dataclasses.replace(engine, gpu=quick), 40, Lengths(8, 16), 5)
    assert seconds == pytest.approx(30 * 8 / 10 + 16)
    assert tail == pytest.approx(8)  # a flat distribution has half of them left after half of the steps
    # A cache of 50 tokens holds 50 / (5 + 16 / 3) of them: at a token drawn at random 16 / 3 are there.
    engine = toy_engine(cache_tokens=50, step_seconds=1.0, max_num_seqs=10)
    seconds, _ = sampling_seconds(shape, dataclasses.replace(engine, gpu=quick), 40, Lengths(8, 16), 5)
    running = 50 / (5 + 16 / 3)
    assert seconds == pytest.approx((40 - running) * 8 / running + 16, rel=1e-3)


def test_training_takes_operations_for_weights_and_pairs_or_waits_for_shards():
    # 3 rows of 10 and a flat 0 to 20, in the mean 20 tokens, squared 100 + 2 x 10 x 10 + 400 / 3.
    squares = 100 + 200 + 400 / 3
    whole = 3 * 2 * (2 * 292 * 20 + 4 * 2 * 6 * squares)
    assert training_flops(SMALL, 3, Lengths(10, 20), 10, 2, causal=False) == pytest.approx(whole, rel=1e-3)
    half = 3 * 2 * (2 * 292 * 20 + 4 * 2 * 6 * squares / 2)
    assert training_flops(SMALL, 3, Lengths(10, 20), 10, 2, causal=True) == pytest.approx(half, rel=1e-3)
    # 630 operations and a ninth of padding on 2 GPUs at 31 a second; 5 times 28 bytes at 7 a second.
    assert rollout.training_seconds(630, TOY, 2, gathered=0, num_passes=5, link=10) == pytest.approx(630 / 0.9 / 62)
    assert rollout.training_seconds(630, TOY, 2, gathered=28, num_passes=5, link=10) == pytest.approx(20)
    assert rollout.PADDING == MAX_PADDING_SHARE


def test_the_step_that_was_measured_on_an_h100_is_foretold():
    # benchmarks/gpu.py with a token budget: 64 completions of Qwen2.5-1.5B, 1,100 tokens in the mean, took 3.55 s.
    shape, _ = find_shape("Qwen/Qwen2.5-1.5B", None)
    flops = training_flops(shape, 64, Lengths(1_100, 4_096), 14, passes=4, causal=False)
    seconds = rollout.training_seconds(flops, GPUS["H100-80GB"], 1, gathered=0, num_passes=12, link=1)
    assert seconds == pytest.approx(3.55, rel=0.05)


def test_a_second_round_comes_as_often_as_the_first_falls_short():
    # 64 of 192 in the mean: half of the time too few, by 0.3989 standard deviations of 6.532 in the mean of all.
    (always, first), (often, second) = expected_rounds(192, 64, 1 / 3, carries=False)
    assert (always, first, often) == (1, 192, pytest.approx(0.5))
    assert often * second == pytest.approx(3 * 6.532 * 0.3989, rel=1e-3)
    carried = expected_rounds(192, 64, 1 / 3, carries=True)
    assert sum(often * groups for often, groups in carried) == pytest.approx(192)
    # Two standard deviations above: 2.3 %.
    assert expected_rounds(200, 100 - 2 * 50**0.5, 0.5, carries=False)[1][0] == pytest.approx(0.0228, abs=1e-3)
