# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The ledger of a run: `rollouts/` in its output folder, with a row for every sampled group, trained or not.

    rollout             number of the rollout in the run
    step                first optimizer step that trains on the rollout, as in the log
    round               round of the rollout, from 1. It is 0 for a partial group of an earlier rollout that was given
                        up, or that was left when the run ended.
    policy_version      number of optimizer steps of the policy that sampled the last completions of the group
    prompt_id, source   the prompt
    outcome             "trained", "carried" (to be trained on in the next rollout), "surplus" (accepted, but the batch
                        was full), "dropped", or "partial" (only the first completions were sampled, so it was neither
                        accepted nor dropped)
    drop_reason         why a group was dropped
    correct, scored     numbers of completions. `correct` is null if no reward says which completions are correct.
    tokens              of the group, without the tokens of tools
    seconds             of the whole round
    lengths, truncated, rewards/<name>
                        of each completion
    prompt, completions
                        text of `log_groups` groups per rollout, and null for the others

The ledger consists of parts, which are parquet files. With every rollout the last part is written to a temporary file
that then replaces it, until the part is large enough. So a run that is killed at any time leaves complete rollouts.
"""

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from ..rewards.task_reward import TaskReward
from ..sampling.batch import Batch
from ..sampling.groups import PromptGroup
from ..sampling.policies import Decisions
from ..sampling.rollout import Rollout
from ..sampling.sampler import Sampler
from .checkpoint import output_folder
from .counts import DROPPED, SAMPLING
from .files import keep_existing, replacing


logger = logging.get_logger(__name__)

LEDGER_NAME = "rollouts"
# From one of these sizes on a new part is begun, so that little has to be rewritten with every rollout.
PART_GROUPS, PART_BYTES = 250, 2**18
REWARDS = "rewards/"
PARTIAL = "partial"  # outcome of a group of which only the first completions were sampled
TEXT = ("prompt", "completions")
Text = tuple[str, list[str]]


class Ledger(TrainerCallback):
    """Callback that writes the outcome of every sampled group to the ledger. Only the main process writes."""

    def __init__(
        self, sampler: Sampler, reward_names: Sequence[str], num_texts: int, task: Callable[[], TaskReward]
    ) -> None:
        self._sampler, self._task = sampler, task
        self._reward_names = list(reward_names)
        self._num_texts = num_texts
        self._verdicts: dict[PromptGroup, str | None] = {}  # of the groups whose text is stored
        self._texts: dict[PromptGroup, Text] = {}
        self._parts: Parts | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        # A new run begins a new ledger. A resumed run continues after the last rollout of its checkpoint.
        self._parts = Parts(Path(output_folder(args)) / LEDGER_NAME)
        has_begun = state.global_step or self._sampler.totals.groups_sampled  # the latter if it is resumed at step 0
        self._parts.begin(self._sampler.num_rollouts if has_begun else 0)

    def add_groups(self, decisions: Decisions) -> None:
        """Store the text of some groups that the sampler is about to decide on. Every process must call this."""
        if self._sampler.rollout.num_groups == 0:
            self._verdicts, self._texts = {}, {}
        verdicts = dict(self._verdicts)
        for group, reason in zip(decisions.groups, decisions.reasons, strict=True):
            if reason is not None or group.is_whole:  # otherwise the rest of the group is sampled, too
                verdicts[group] = reason
        chosen = choose(verdicts, self._num_texts)
        texts = self._texts | _read_texts([group for group in chosen if group not in self._texts])
        self._verdicts = {group: verdicts[group] for group in chosen}
        self._texts = {group: texts[group] for group in chosen}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Add the partial groups that are left, as groups of the next rollout. A resumed run removes these rows."""
        self._texts = {}
        unfinished = Batch([], [], [], dropped_partial=self._sampler.queue.partial)
        self.end_rollout(self._sampler.next_rollout(), unfinished, state.global_step - 1)

    def end_rollout(self, rollout: Rollout, batch: Batch, step: int) -> None:
        """Add the groups that a rollout decided on or gave up."""
        if self._parts is None or not _groups_to_describe(rollout, batch):
            return
        rows = describe_groups(rollout, batch, step, self._task(), self._reward_names, self._texts)
        try:
            self._parts.append(rows)
        except OSError as error:
            logger.warning(
                f"`{self._parts.folder}` cannot be written: {error}. The run continues, but without its ledger."
            )
            self._parts = None


Key = TypeVar("Key", bound=Hashable)


def choose(verdicts: Mapping[Key, Hashable], number: int) -> list[Key]:
    """
    Return up to `number` groups: the first of every verdict, then the second of every verdict, and so on.

    Every process chooses the same groups.
    """
    seen: Counter[Hashable] = Counter()
    turns = []
    for place, verdict in enumerate(verdicts.values()):
        turns.append((seen[verdict], place))
        seen[verdict] += 1
    groups = list(verdicts)
    return [groups[place] for place in sorted(place for _, place in sorted(turns)[:number])]


def _read_texts(groups: Sequence[PromptGroup]) -> dict[PromptGroup, Text]:
    """
    Return the prompt and the completions of groups.

    The rows of a group may be on several processes. Every process must call this function.
    """
    if not groups:
        return {}
    mine = [
        (number, index, as_text(row.prompt), as_text(row.completion))
        for number, group in enumerate(groups)
        for index, row in group.rows.items()
    ]
    texts: dict[PromptGroup, Text] = {}
    for number, _, prompt, completion in sorted(gather_object(mine)):
        texts.setdefault(groups[number], (prompt, []))[1].append(completion)
    return texts


def as_text(messages: Any) -> str:
    """
    Return messages as text: the content of a single message, or of several with their roles.

    Characters that UTF-8 cannot encode are escaped.
    """
    if not (isinstance(messages, list) and messages and all(isinstance(message, Mapping) for message in messages)):
        text = str(messages)
    elif len(messages) == 1:
        text = _content(messages[0])
    else:
        text = "\n\n".join(f"{message.get('role')}: {_content(message)}" for message in messages)
    return _utf8(text)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    calls = message.get("tool_calls")
    return f"{content}{calls}" if calls else str(content)


def _part(part: Any) -> str:
    return str(part) if not isinstance(part, Mapping) else part.get("text") or f"[{part.get('type')}]"


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _texts(texts: Iterable[str | None]) -> pa.Array:
    return pa.array([None if text is None else _utf8(text) for text in texts], pa.string())


def _groups_to_describe(rollout: Rollout, batch: Batch) -> list[PromptGroup]:
    return sorted([*rollout.decided_groups, *batch.dropped_partial], key=lambda group: group.number)


def describe_groups(
    rollout: Rollout,
    batch: Batch,
    step: int,
    task: TaskReward,
    reward_names: Sequence[str],
    texts: Mapping[PromptGroup, Text],
) -> pa.Table:
    """Return the ledger's rows for a rollout, one per group, in the order in which the prompts were drawn."""
    groups = _groups_to_describe(rollout, batch)
    ends = list(itertools.accumulate(group.num_received for group in groups))
    outcomes = {
        **dict.fromkeys(batch.dropped_partial, PARTIAL),
        **dict.fromkeys(rollout.dropped, "dropped"),
        **dict.fromkeys(rollout.accepted, "surplus"),
        **dict.fromkeys(batch.carried_to_next, "carried"),
        **dict.fromkeys(batch.train, "trained"),
    }

    def total(values_B: Tensor) -> list[int]:
        return [int(values_B[end - group.num_received : end].sum()) for end, group in zip(ends, groups, strict=True)]

    rewards_BF = torch.cat([group.rewards for group in groups])
    lengths_B = torch.tensor([length for group in groups for length in group.lengths], dtype=torch.int32)
    truncated_B = torch.tensor([is_cut for group in groups for is_cut in group.truncated], dtype=torch.bool)
    task_B = task.weighted_sum(rewards_BF)
    correct_B = task.is_correct(rewards_BF)
    # A partial group may have been sampled in a round of an earlier rollout.
    rounds = [group.round if group.round in rollout.rounds else None for group in groups]
    columns = {
        "rollout": pa.array([rollout.number] * len(groups), pa.int32()),
        "step": pa.array([step + 1] * len(groups), pa.int32()),
        "round": pa.array([0 if round_ is None else round_.number for round_ in rounds], pa.int16()),
        "policy_version": pa.array(
            [None if round_ is None else g.weights_steps[-1] for g, round_ in zip(groups, rounds, strict=True)],
            pa.int32(),
        ),
        "prompt_id": _texts(group.name for group in groups),
        "source": _texts(group.source for group in groups),
        "outcome": pa.array([outcomes[group] for group in groups], pa.string()),
        "drop_reason": _texts(group.drop_reason if outcomes[group] == "dropped" else None for group in groups),
        "correct": pa.array(total(correct_B) if task.has_correctness else [None] * len(groups), pa.int16()),
        "scored": pa.array(total(~task_B.isnan()), pa.int16()),
        "tokens": pa.array(total(lengths_B), pa.int32()),
        "seconds": pa.array([None if round_ is None else round_.seconds for round_ in rounds], pa.float32()),
        "lengths": _lists(lengths_B, ends),
        "truncated": _lists(truncated_B, ends),
    }
    for name, rewards_B in zip(reward_names, rewards_BF.T, strict=True):
        columns[_free_name(f"{REWARDS}{name}", columns)] = _lists(rewards_B.float(), ends)
    columns["prompt"] = pa.array([texts[g][0] if g in texts else None for g in groups], pa.string())
    columns["completions"] = pa.array([texts[g][1] if g in texts else None for g in groups], pa.list_(pa.string()))
    return pa.table(columns)


def _free_name(name: str, taken: Container[str]) -> str:
    """Return the name of a column, with a number from 2 on if another column already has the name."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _lists(values_B: Tensor, ends: Sequence[int]) -> pa.ListArray:
    """
    Return an array with one list per group, whose values end at `ends`.

    NaN means that a completion has no reward, and becomes null.
    """
    return pa.ListArray.from_arrays(np.array([0, *ends], dtype=np.int32), pa.array(values_B.numpy(), from_pandas=True))


class Parts:
    """A folder of parquet files to which whole rollouts are added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        self._rows: pa.Table | None = None  # of the last part, if rows may be added to it

    def begin(self, num_rollouts: int) -> None:
        """
        Remove the rows of rollout `num_rollouts` and later ones.

        If it is 0, a new run begins. A folder that an earlier run has left is then renamed.
        """
        if num_rollouts == 0:
            keep_existing(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("part-*.tmp"):  # left by a run that was killed while it wrote
            path.unlink()
        self._number, self._rows = 0, None
        # From the last part backwards, so that the parts have no gap if the process is killed in between.
        for path in reversed(_paths(self.folder)):
            rows = _read(path)
            if rows is None:
                logger.warning(f"{path} cannot be read. It is renamed to {path.name}.torn, and its rows are missing.")
                os.replace(path, path.with_suffix(".parquet.torn"))
                continue
            kept = rows.filter(pc.less(rows["rollout"], num_rollouts))
            if kept.num_rows == 0:
                path.unlink()
                continue
            self._number = int(path.stem.rpartition("-")[2])
            if kept.num_rows < rows.num_rows:
                _replace(path, kept)
            self._leave(path, kept)
            break

    def append(self, rows: pa.Table) -> None:
        """Add the rows of a rollout: all of them, or none if the process is killed meanwhile."""
        if self._rows is not None and self._rows.schema == rows.schema:
            rows = pa.concat_tables([self._rows, rows]).combine_chunks()
        else:
            self._number += 1
        path = self.folder / f"part-{self._number:05d}.parquet"
        _replace(path, rows)
        self._leave(path, rows)

    def _leave(self, path: Path, rows: pa.Table) -> None:
        """Remember the rows of the last part, unless it is large enough to begin a new one."""
        self._rows = rows if rows.num_rows < PART_GROUPS and path.stat().st_size < PART_BYTES else None


def _replace(path: Path, rows: pa.Table) -> None:
    # By the column names of parquet. Stronger compression takes more time, and is worth it only for text.
    compression = {}
    for field in rows.schema:
        name = f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        compression[name] = "zstd" if field.name in TEXT else "snappy"
    buffer = pa.BufferOutputStream()  # for a single write to the disk instead of one per column
    pq.write_table(rows, buffer, compression=compression, write_statistics=False)
    with replacing(path) as temporary:
        temporary.write_bytes(buffer.getvalue())


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"), key=lambda path: (len(path.name), path.name))


def _read(path: Path) -> pa.Table | None:
    try:
        with path.open("rb") as file:
            return pq.read_table(file)
    except (OSError, pa.ArrowException):  # after a loss of power the end of a file may be missing
        return None


def read_rollouts(folder: str | os.PathLike, last_step: int) -> list[dict[str, Any]]:
    """
    Return the rollouts of a run, oldest first, in the form of log entries.

    An entry has the last step on the rollout, the numbers of groups that were sampled, trained on in this rollout and
    dropped, and the mean of each reward over their completions. Rollouts without a decided group are left out.
    """
    steps: dict[int, int] = {}
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    rewards: dict[int, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for path in _paths(Path(folder) / LEDGER_NAME):
        rows = _read(path)
        if rows is None:
            return []
        rows = rows.filter(pc.not_equal(rows["outcome"], PARTIAL))
        numbers = rows["rollout"].to_numpy()
        names = ("step", "outcome", "drop_reason")
        for number, step, outcome, reason in zip(
            numbers.tolist(), *(rows[name].to_pylist() for name in names), strict=True
        ):
            steps[number] = step
            counts[number][f"{SAMPLING}groups_generated"] += 1
            counts[number][f"{SAMPLING}groups_trained"] += outcome == "trained"
            if reason is not None:
                counts[number][f"{DROPPED}{reason}"] += 1
        for name in (name for name in rows.column_names if name.startswith(REWARDS)):
            column = rows[name].combine_chunks()
            values = pc.list_flatten(column).to_numpy(zero_copy_only=False)
            of_rollout = numbers[pc.list_parent_indices(column).to_numpy()]
            for number in np.unique(of_rollout).tolist():
                rewards[number][f"{name}/mean"].append(values[(of_rollout == number) & ~np.isnan(values)])
    found = sorted(steps.items())
    ends = [*(step - 1 for _, step in found[1:]), last_step]
    return [
        {"step": end, **counts[number], **_means(rewards[number])}
        for (number, _), end in zip(found, ends, strict=False)  # without rollouts there is still one end
    ]


def _means(parts_by_name: Mapping[str, list[np.ndarray]]) -> dict[str, float]:
    """Return the mean of each name's values, which are in several parts. Names without values are left out."""
    joined = {name: np.concatenate(parts) for name, parts in parts_by_name.items()}
    return {name: float(values.mean(dtype=np.float64)) for name, values in joined.items() if len(values)}


def read_ledger(folder: str | os.PathLike, notes: list[str] | None = None) -> pa.Table | None:
    """
    Return the ledger in a run's `output_dir` with one row per group, or `None` if there is no ledger.

    The rows are in the order of sampling. For each part that cannot be read, a sentence is added to `notes`.

    Example:

    ```python
    >>> read_ledger("outputs/run").to_pandas().groupby("drop_reason").size()
    ```
    """
    tables = []
    for path in _paths(Path(folder) / LEDGER_NAME):
        rows = _read(path)
        if rows is not None:
            tables.append(rows)
        elif notes is not None:
            notes.append(f"{LEDGER_NAME}/{path.name} cannot be read and is left out.")
    return pa.concat_tables(tables, promote_options="default") if tables else None
