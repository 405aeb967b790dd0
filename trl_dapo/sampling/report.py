# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of rollouts, and messages about them. Pure functions."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from .batch import Batch
from .drop_reasons import REASONS, has_spread, reward_sizes, task_reward
from .groups import PromptGroup
from .rollout import Rollout
from .rounds import Round
from .sampler import DATA, MAX_STALENESS, ORDER, Sampler


# Advice to the user, by the reason for which most groups were dropped.
ADVICE = {
    "all_wrong": "Most prompts are too hard for the model: use easier prompts, a larger `num_generations` or a longer "
    "`max_completion_length`, or check that the reward function recognizes correct completions.",
    "all_correct": "Most prompts are too easy for the model: use harder prompts or a larger `num_generations`.",
    "constant": "In most groups all completions get the same reward. If all groups get the same value, nothing can be "
    "learned: check the reward function. Otherwise use a larger `num_generations`, or a reward function with more "
    "distinct values.",
    "outside_band": "Widen `dynamic_sampling_min_accuracy` and `dynamic_sampling_max_accuracy`.",
    "unscored": "The reward functions that decide return `None` or NaN for most completions: check their inputs.",
    "masked": "In most groups completions are cut off, and the others are too few or get the same reward: raise "
    "`max_completion_length` or turn `overlong_filtering` off.",
}


def rollout_metrics(rounds: Sequence[Round], reward_names: Sequence[str], weights_F: Tensor) -> dict[str, float]:
    """Return TRL's metrics of all completions of a rollout, as if they were one batch. NaN if none was scored."""
    metrics = _merged([(round_.metrics, len(round_.completions)) for round_ in rounds])
    completions = [completion for round_ in rounds for completion in round_.completions]
    rewards_BF = torch.stack([group.rewards[index] for group, index in completions]).double()
    total_B = (rewards_BF * weights_F.to(rewards_BF)).nansum(dim=1)
    metrics["reward"], metrics["reward_std"] = _mean_and_std(total_B[~rewards_BF.isnan().all(dim=1)])
    for name, reward_B in zip(reward_names, rewards_BF.T, strict=True):
        metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = _mean_and_std(reward_B[~reward_B.isnan()])
    lengths_B = torch.tensor([group.lengths[index] for group, index in completions]).double()
    truncated_B = torch.tensor([group.truncated[index] for group, index in completions])
    return metrics | length_metrics(lengths_B, truncated_B)


def length_metrics(lengths_B: Tensor, truncated_B: Tensor) -> dict[str, float]:
    """Return TRL's metrics of the length of completions and of the share that is cut off."""
    metrics = {"completions/clipped_ratio": truncated_B.double().mean().item()}
    ended_B = lengths_B[~truncated_B] if not truncated_B.all() else torch.zeros(1)  # TRL logs 0 if none ended
    for name, values in (("", lengths_B), ("terminated_", ended_B)):
        for statistic in (torch.mean, torch.min, torch.max):
            metrics[f"completions/{statistic.__name__}_{name}length"] = statistic(values).item()
    return metrics


def source_metrics(rollout: Rollout, sources: Sequence[str], weights_F: Tensor) -> dict[str, float]:
    """Return the acceptance rate and the mean reward of the groups of each source."""
    metrics, accepted = {}, set(rollout.accepted)
    for source in sources:
        groups = [group for group in rollout.decided_groups if group.source == source]
        if not groups:
            continue
        num_accepted = sum(group in accepted for group in groups)  # surplus that is discarded has a drop reason too
        metrics[f"dynamic_sampling/acceptance_rate/{source}"] = num_accepted / len(groups)
        total_B = torch.cat([_total_rewards(group, weights_F) for group in groups])
        if len(total_B):
            metrics[f"reward/{source}"] = total_B.mean().item()
    return metrics


def _total_rewards(group: PromptGroup, weights_F: Tensor) -> Tensor:
    """Return the total reward of each scored completion of a group."""
    rewards_BF = group.rewards.double()
    return (rewards_BF * weights_F.to(rewards_BF)).nansum(dim=1)[~rewards_BF.isnan().all(dim=1)]


def _differs(rewards_BF: Tensor, weights_F: Tensor) -> bool:
    """Return whether the total rewards of a group's scored completions differ."""
    is_counted_F = torch.ones_like(weights_F, dtype=torch.bool)
    total_1B = task_reward(rewards_BF, weights_F, is_counted_F)[None]
    sizes_1B = reward_sizes(rewards_BF, weights_F, is_counted_F)[None]
    return bool(has_spread(total_1B, ~total_1B.isnan(), sizes_1B).item())


def rollout_log(
    sampler: Sampler, batch: Batch, reward_names: Sequence[str], weights_F: Tensor, sampling: dict[str, float]
) -> dict[str, float]:
    """
    Return all metrics of a rollout by the names under which they are logged. `sampling` holds further ones, without
    the prefix `dynamic_sampling/`.
    """
    rollout = sampler.rollout
    metrics: dict[str, float] = {}
    if rollout.num_rounds:
        metrics = rollout_metrics(rollout.rounds, reward_names, weights_F)
        metrics |= source_metrics(rollout, sampler.sources, weights_F)
    if groups := rollout.decided_groups:
        # Computed here because TRL expects groups of equal size. And it takes rewards as equal if their standard
        # deviation is 0, which rounding may make a little larger.
        num_equal = sum(not _differs(group.rewards, weights_F) for group in groups)
        metrics["frac_reward_zero_std"] = num_equal / len(groups)
    reasons = rollout.drop_reasons
    sampling = {**sampling, "skipped_by_memory": 0.0}
    for policy in sampler.selection.policies:
        sampling |= policy.metrics()
    sampling = {
        **sampling,
        "refill_seconds": sum(round_.seconds for round_ in rollout.refills),
        "rounds": rollout.num_rounds,
        "groups_generated": rollout.num_groups,
        "groups_trained": len(batch.train),
        "completions_generated": rollout.num_completions,
        "completions_trained": len(batch.train) * sampler.num_generations,
        "tokens_generated": rollout.num_tokens,
        "surplus": max(rollout.num_trainable - max(rollout.target, rollout.num_accepted_before), 0),
        "carried": rollout.num_accepted_before,
        "shortfall": rollout.shortfall,
        **{f"dropped/{reason}": reasons[reason] for reason in dict.fromkeys([*REASONS, *reasons])},
        "passes": sampler.passes,
    }
    if rollout.num_groups:
        sampling["acceptance_rate"] = rollout.acceptance_rate
    metrics |= {f"dynamic_sampling/{name}": float(value) for name, value in sampling.items()}
    if sampler.selection.splits_groups:
        metrics["dynamic_sampling/partial_groups"] = float(len(batch.partial))
    if sampler.rollouts_ahead:
        counts = Counter(group.staleness(rollout.number) for group in batch.train)
        metrics |= {f"rollouts_ahead/groups_by_staleness/{n}": float(counts[n]) for n in range(MAX_STALENESS + 1)}
        metrics["rollouts_ahead/in_flight"] = float(len(sampler.queue.requests_in_flight))
        metrics["rollouts_ahead/discarded"] = float(len(batch.discarded))
    return metrics


def _mean_and_std(values: Tensor) -> tuple[float, float]:
    mean = values.mean().item() if len(values) else torch.nan
    return mean, values.std().item() if len(values) > 1 else torch.nan


def _merged(rounds: list[tuple[dict[str, list[float]], int]]) -> dict[str, float]:
    """
    Merge each metric of several rounds into one value: minima into the lowest, maxima into the highest, and any other
    metric into its mean over rows.
    """
    values: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for metrics, num_rows in rounds:
        for name, (value, *_) in metrics.items():
            # `sampling/` metrics need log-probabilities, which only trained rows have. `num_tokens` is a total of the
            # run.
            if not name.startswith("sampling/") and name != "num_tokens" and value == value:
                values[name].append((value, num_rows))
    merged = {}
    for name, pairs in values.items():
        statistic = name.split("/")[-1]  # such as `min_length`
        if statistic.split("_")[0] == "min":
            merged[name] = min(value for value, _ in pairs)
        elif statistic.split("_")[0] == "max":
            merged[name] = max(value for value, _ in pairs)
        else:
            merged[name] = sum(value * rows for value, rows in pairs) / sum(rows for _, rows in pairs)
    return merged


def describe_unscored(rollout: Rollout, names: Sequence[str]) -> str | None:
    """
    Describe the reward functions that scored no completion of the first rollout. Return `None` if each scored one, or
    if every completion was scored by some function: others may be meant for prompts that did not come up yet.
    """
    if not rollout.num_rounds:
        return None
    rewards_BF = torch.stack(
        [group.rewards[index] for round_ in rollout.rounds for group, index in round_.completions]
    )
    silent_F = rewards_BF.isnan().all(dim=0).tolist()
    silent = [repr(name) for name, is_silent in zip(names, silent_F, strict=True) if is_silent]
    if not silent or not rewards_BF.isnan().all(dim=1).any():
        return None
    return (
        f"{' and '.join(silent)} scored none of the {len(rewards_BF):,} completions of the first rollout, but "
        "returned `None` or NaN for each. Check that the dataset has the columns that the reward function reads."
    )


def _list_drop_reasons(rollout: Rollout) -> str:
    """Return the reasons for which groups were dropped, each with the number of groups, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in rollout.drop_reasons.most_common())


def describe_shortfall(rollout: Rollout, limit: float, num_short: int = 0, num_trained: int | None = None) -> str:
    """
    Describe a batch that is not full, and what to do about it.

    Args:
        rollout ([`Rollout`]):
            The rollout, after its last round.
        limit (`float`):
            `dynamic_sampling_max_gen_batches`.
        num_short (`int`, *optional*, defaults to `0`):
            Number of rollouts in a row that fell short, including this one.
        num_trained (`int`, *optional*):
            Number of groups that train in spite of this. `None` if the run stops here.
    """
    reasons = _list_drop_reasons(rollout)
    dropped = f" (dropped: {reasons})" if reasons else ""
    num_before = rollout.num_accepted_before
    before = f", and {num_before} were accepted earlier" if num_before else ""
    batches = "batch" if limit == 1 else "batches"
    at = f"at the limit of {limit:g} {batches} of completions" if limit else "since no further group was accepted"
    what = (
        f"{len(rollout.accepted)} of {rollout.num_groups} sampled groups were accepted{dropped}{before}; a full batch "
        f"has {rollout.target}."
    )
    setting = f"`dynamic_sampling_max_gen_batches` ({limit:g})" if limit else "`dynamic_sampling_stop_after`"
    about_data, about_limit = advise(rollout), _why_not_raise_limit(rollout, setting)
    if about_limit is None:
        about_limit = f"Or raise {setting}." if about_data else f"Raise {setting}."
    advice = f"{about_data}{about_limit}"
    if num_trained is None:
        to_continue = "train on what was accepted" if rollout.num_trainable else "continue with the next rollout"
        return (
            f"The batch is not full {at}: {what} {advice} Or set `dynamic_sampling_on_exhausted='top_up'` to "
            f"{to_continue}."
        )
    groups = "group" if num_trained == 1 else "groups"
    outcome = f"trains on {num_trained} {groups}" if num_trained else "trains on no group and changes no weights"
    in_a_row = f"for {num_short} rollouts in a row" if num_short > 1 else "this time"
    return f"The batch is not full {at}, {in_a_row}: {what} This rollout {outcome}. {advice}"


def describe_empty_batch(rollout: Rollout, num_short: int) -> str:
    """Describe that a rollout of the mode "mask", which samples one batch, has no group to train on."""
    reasons = _list_drop_reasons(rollout)
    when, of_last = "in this rollout", ""
    if num_short > 1:
        when, of_last = f"for {num_short} rollouts in a row", " in the last one"
    return (
        f"No group was accepted {when} (dropped{of_last}: {reasons}), so no weights are changed. {advise(rollout)}"
    ).rstrip()


def describe_no_group_yet(sampler: Sampler) -> str:
    """Describe a rollout that continues although none of its groups was accepted so far, and when it ends."""
    rollout = sampler.rollout
    reasons = _list_drop_reasons(rollout)
    if sampler.max_gen_batches:
        end = f"until the limit of {sampler.max_gen_batches:g} batches (`dynamic_sampling_max_gen_batches`) is reached"
    elif sampler.max_empty_batches:
        end = (
            f"until {sampler.max_empty_batches:g} batches brought none (10 times `dynamic_sampling_stop_after`), "
            "because `dynamic_sampling_max_gen_batches=0` sets no limit"
        )
    else:
        end = "without end: `dynamic_sampling_max_gen_batches` and `dynamic_sampling_stop_after` are both 0"
    num_batches = rollout.num_completions // (sampler.target * sampler.num_generations)
    return (
        f"No group was accepted in {num_batches} batches of completions (dropped: {reasons}). Sampling continues "
        f"{end}. {advise(rollout)}"
    ).rstrip()


def _why_not_raise_limit(rollout: Rollout, setting: str) -> str | None:
    """Return why a higher limit would not fill the batch, or `None` if it may."""
    if _main_drop_reason(rollout) == "unscored":
        return f"A higher {setting} does not help, since groups without scores are never accepted."
    if rollout.num_groups and not rollout.accepted:
        return f"No group was accepted, so a higher {setting} would probably not fill the batch either."
    return None


def describe_stop(rollout: Rollout, num_rollouts: int, checkpoint: str, num_empty_batches: float | None = None) -> str:
    """
    Describe why a run stops that no longer accepts any group, what to change, and how to continue.

    Args:
        rollout ([`Rollout`]):
            The last rollout.
        num_rollouts (`int`):
            Number of rollouts in a row that accepted no group.
        checkpoint (`str`):
            Folder to continue from.
        num_empty_batches (`float`, *optional*):
            Set if a rollout without a limit gave up: the number of batches of completions in a row without an accepted
            group.
    """
    reasons = _list_drop_reasons(rollout)
    if num_empty_batches is not None:
        where = f"the last {num_empty_batches:g} batches of completions"
    else:
        where = "the last rollout" if num_rollouts == 1 else f"the last {num_rollouts} rollouts"
    return (
        f"Training stops: no group was accepted in {where} (dropped in the last rollout: {reasons}). "
        f"{advise(rollout)}{checkpoint} can be resumed. With `dynamic_sampling_stop_after=0` a run never stops for "
        "this reason."
    )


def advise(rollout: Rollout) -> str:
    """Return advice and a space if most groups were dropped for the same reason, otherwise an empty string."""
    reason = _main_drop_reason(rollout)
    return f"{ADVICE[reason]} " if reason in ADVICE else ""


def _main_drop_reason(rollout: Rollout) -> str | None:
    """Return the reason for which more than half of the groups were dropped, if there is one."""
    for reason, count in rollout.drop_reasons.most_common(1):
        if 2 * count > rollout.num_groups:
            return reason
    return None


def describe_mismatch(folder: str, differs: dict[str, tuple], has_rows: bool, resumed: str) -> str | None:
    """
    Describe what is not used of a checkpoint that does not fit the run. Return `None` if all of it is used. `resumed`
    says what is used, as the beginning of a sentence.
    """
    lost = []
    if has_rows:
        lost.append("its completions of an unfinished rollout and of carried groups are not used")
    if differs.keys() & ORDER or differs.get("use_dynamic_sampling") == (False, True):
        lost.append("a new pass over the prompts begins")
    if not lost:
        return None
    settings = [
        f"`{name}` ({theirs!r} there, {mine!r} here)" for name, (theirs, mine) in differs.items() if name not in DATA
    ]
    changes = [_describe_other_data(differs)] if differs.keys() & DATA else []
    if settings:
        changes.append(f"other settings: {', '.join(settings)}")
    sources = ["dataset"] * bool(differs.keys() & DATA) + ["settings"] * bool(settings)
    return (
        f"{folder} was written with {', and with '.join(changes)}. {resumed}, but {' and '.join(lost)}. To use all of "
        f"the checkpoint, resume with its {' and '.join(sources)}. If you meant to change "
        f"{'them' if settings else 'the dataset'}, there is nothing to do."
    )


def _describe_other_data(differs: dict[str, tuple]) -> str:
    """Return in words how the dataset of a checkpoint differs from that of the run."""
    if "first_rows" in differs:
        return "another dataset (its first rows differ)"
    there, here = differs["dataset"]
    if there == here:
        return f"another dataset ({here:,} rows there and here, but other prompts or another order)"
    there, here = ("streamed" if num_rows is None else f"{num_rows:,} rows" for num_rows in (there, here))
    return f"another dataset ({there} there, {here} here)"
