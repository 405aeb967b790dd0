# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Pass rates of the training prompts that are known before a run: from an evaluation, an earlier run or a checkpoint.
"""

import json
from collections import Counter
from pathlib import Path

from ..sampling.example_names import NO_SOURCE, has_id, id_of_prompt, problem_id, problem_source
from ..sampling.prompt_memory import PromptMemory
from ..sampling.sampler import Sampler
from .checkpoint import MEMORY_NAME, STATE_NAME
from .ledger import read_ledger


EVALUATED = "summary.json"  # of `trl-dapo eval`


def learn_from(folder: str, sampler: Sampler) -> str:
    """Teaches the sampler's memory what a folder says of its prompts, at half its weight; returns one line on it."""
    path, setting = Path(folder).expanduser(), f"`dynamic_sampling_memory={folder!r}`"
    if not path.is_dir():
        raise FileNotFoundError(f"{setting}: there is no such folder.")
    memory, rows = sampler.selection.find(PromptMemory), sampler.stream.rows_by_name(("id", "source", "prompt"))
    assert memory is not None
    if (path / MEMORY_NAME).is_file():
        state = json.loads((path / STATE_NAME).read_text())["policies"][PromptMemory.__name__]
        memory.load_state_dict(state | {"records": PromptMemory.read(path / MEMORY_NAME), "seed": memory.seed})
    elif (path / EVALUATED).is_file() and rows:
        problems = json.loads((path / EVALUATED).read_text())["problems"]
        found = {(p["source"], p["id"]): (p["num_correct"], p["num_completions"]) for p in problems}
        problems_of = {name: (problem_source(row) or NO_SOURCE, problem_id(row)) for name, row in rows.items()}
        num_named = Counter(problems_of[name] for name, row in rows.items() if has_id(row))
        num_asked = Counter((problems_of[name][0], id_of_prompt(row)) for name, row in rows.items())
        for name, row in rows.items():
            source, id_ = problems_of[name]
            if num_asked[source, id_of_prompt(row)] > 1:  # one prompt with several golds: nobody knows which it was
                continue
            # If several prompts have the same id, an evaluation says which one it means, if it saw several.
            ids: list[str | None] = [id_of_prompt(row)]
            if num_named[source, id_] <= 1:
                ids.append(id_)
            counts = next((found[source, each] for each in ids if (source, each) in found), None)
            if counts is not None:
                num_correct, num_completions = counts
                memory.update(name, num_correct, num_completions, step=0)
    elif (groups := read_ledger(path)) is not None:
        columns = [groups[column].to_pylist() for column in ("prompt_id", "correct", "scored")]
        for name, num_correct, num_scored in zip(*columns, strict=True):
            if num_correct is not None:
                memory.update(name, num_correct, num_scored, step=0)
    else:
        raise ValueError(
            f"{setting} holds no checkpoint with a memory, no ledger of a run"
            f"{', and no evaluation' if rows else '; an evaluation needs a dataset of known length'}."
        )
    memory.halve()
    known = memory.prompts & rows.keys() if rows else memory.prompts
    if not known:
        raise ValueError(f"{setting} knows none of the training prompts. Are they the ones that were asked there?")
    return f"{len(known)}{f' of {len(rows)}' if rows else ''} prompts are known from `{folder}`."
