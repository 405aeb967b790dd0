# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Pass rates of training prompts that are known before a run: from an evaluation, an earlier run or a checkpoint."""

import json
from collections import Counter
from pathlib import Path

from ..sampling.example_names import NO_SOURCE, has_id, id_of_prompt, problem_id, problem_source
from ..sampling.prompt_memory import PromptMemory
from ..sampling.sampler import Sampler
from .checkpoint import MEMORY_NAME, STATE_NAME
from .ledger import read_ledger


EVALUATED = "summary.json"  # written by `trl-dapo eval`


def load_pass_rates(folder: str, sampler: Sampler) -> str:
    """
    Load the pass rates in a folder into the sampler's pass-rate memory, with half their weight.

    Returns:
        `str`: A sentence on how many prompts are known, for the start of the run.
    """
    path, setting = Path(folder).expanduser(), f"`dynamic_sampling_memory={folder!r}`"
    if not path.is_dir():
        raise FileNotFoundError(
            f"{setting} is not a folder. Name the folder of an evaluation, a run or a checkpoint, or set `True`, "
            '`False` or `"auto"`.'
        )
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
        num_with_prompt = Counter((problems_of[name][0], id_of_prompt(row)) for name, row in rows.items())
        for name, row in rows.items():
            source, id_ = problems_of[name]
            # If a prompt has several gold answers, it is unknown which one the evaluation used.
            if num_with_prompt[source, id_of_prompt(row)] > 1:
                continue
            # An evaluation of several prompts with one id names them by a hash of the prompt.
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
        evaluation = ", nor an evaluation"
        if not rows:
            evaluation = " (an evaluation cannot be used with a dataset of unknown length)"
        raise ValueError(
            f"{setting} contains no pass rates: neither a checkpoint with a pass-rate memory, nor the ledger of a "
            f"run{evaluation}. Name another folder."
        )
    memory.halve()
    known = memory.prompts & rows.keys() if rows else memory.prompts
    if not known:
        raise ValueError(
            f"{setting} contains pass rates, but none of the training prompts. Name the folder of a run on, or an "
            "evaluation of, the same prompts in the same style."
        )
    return f"The pass rates of {len(known)}{f' of {len(rows)}' if rows else ''} prompts are known from `{folder}`."
