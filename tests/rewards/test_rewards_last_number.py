# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards of plain answers. What a last number is stands in tests/evaluation/test_evaluation_scorers.py."""

import math

import pytest

from trl_dapo.rewards import bare_number_reward, last_number_reward


pytestmark = pytest.mark.fast


def test_the_last_number_is_rewarded_in_text_and_in_messages_and_its_answer_is_logged():
    texts, columns = ["17 * 3 = 51", "51 or 52", "none", "51.0"], {}
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    golds = ["51", "51", "51", 51]
    assert last_number_reward(texts, golds, log_extra=columns.__setitem__) == [1, 0, 0, 1]
    assert columns == {"last_number_answer": ["51", "52", "", "51"]}
    assert last_number_reward(completions=messages, solution=golds, prompts=texts) == [1, 0, 0, 1]


def test_a_gold_answer_that_is_no_number_gives_no_reward():
    golds = [None, "", "3/4", "five", math.nan, "$51$"]
    assert last_number_reward(["51"] * len(golds), golds) == [None, None, None, None, None, 1]


BARE = dict.fromkeys(["51", " 51\n", "-4", "1,234", "51.5", "$51"], 1)
BARE |= dict.fromkeys(["51.", "51 apples", "17 * 3 = 51", "51 51", "fifty-one", ""], 0)


@pytest.mark.parametrize("text", BARE)
def test_a_bare_number_is_rewarded_right_or_wrong_and_none_beside_anything_else(text):
    both = [text, [{"role": "assistant", "content": text}]]
    assert bare_number_reward(both, solution=["51", "7"]) == [BARE[text]] * 2
