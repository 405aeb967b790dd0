# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The examples of a dataset that have the longest prompts."""

from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset
from transformers.trainer_utils import has_length


MAX_READ = 20_000  # examples


def _count_characters(prompt: Any) -> int:
    """Return the number of characters of a prompt, in all messages if it is a conversation."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content"))) for message in prompt)


def count_examples(dataset: Any, most: int = MAX_READ) -> int:
    """Return the number of examples of a dataset. If it is a stream, at most the first `most` are read and counted."""
    return len(dataset) if has_length(dataset) else sum(1 for _ in islice(dataset, most))


def select_longest(dataset: Any, num: int) -> Dataset:
    """
    Return the examples with the longest prompts, measured in characters, the longest first. Only the first `MAX_READ`
    examples of a dataset are looked at.
    """
    if isinstance(dataset, IterableDataset):
        dataset = Dataset.from_list(list(islice(dataset, MAX_READ)))
    places = list(range(min(len(dataset), MAX_READ)))
    if "prompt" in dataset.column_names:  # otherwise environments make the prompts
        prompts = dataset.select_columns("prompt").select(places)
        sizes = [_count_characters(example["prompt"]) for example in prompts]
        places.sort(key=lambda place: -sizes[place])
    return dataset.select(places[:num])
