# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules: which settings contradict each other, why, and what to do instead.

Allowed values of single settings are in `ranges.py`, and the checks of batch sizes in `batch_sizes.py`. The functions
need no torch, so a plan can use them too.
"""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from .arguments import read_mapping
from .ranges import why_unscalable


class Rule(NamedTuple):
    """A check of the settings, and of facts about the run, in one namespace."""

    breaks: Callable[[SimpleNamespace], Any]  # returns whether the rule is broken, or the message if `message` is None
    # Names the value, the reason and what to do instead. `{name}` stands for the value of a setting or fact.
    message: str | Callable[[SimpleNamespace], str] | None = None
    facts: tuple[str, ...] = ()  # names of the facts that must be known besides the settings


# Losses that leave out the rows which only fill a rollout. `update/loss.py` says what each of them divides by.
KNOWN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo", "bnpo", "cispo", "vespo", "dapo")

# Reward functions of this package and of TRL that measure length. They never decide which groups are accepted.
LENGTH_PENALTIES = ("soft_overlong_punishment", "soft_overlong_punishment_reward")

# Part of the message for a setting that cannot be used because no reward says which completions are correct.
NEEDS_CORRECTNESS = "needs to know which completions are correct"

# Keys that `generation_kwargs` may not contain, and what to do instead.
UNSUPPORTED_GENERATION_KWARGS = {
    **dict.fromkeys(("n", "best_of", "num_return_sequences"), "Set `num_generations`"),
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "Set `max_completion_length`"),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "Leave it out: those of the sampled tokens are always requested"),
    **dict.fromkeys(("do_sample", "num_beams"), "Leave it out: every completion is sampled"),
    "temperature": "Set `temperature`, which also scales the log-probabilities in training",
    "seed": "Leave it out: with it all completions of a prompt would be the same. The setting `seed` is another one",
    "stop_strings": "vLLM calls it `stop`, and transformers needs a tokenizer that `GRPOTrainer` does not pass to it. "
    "Set `use_vllm=True` and `generation_kwargs={'stop': ...}`, or leave it out",
    "eos_token_id": "transformers knows it, but vLLM does not. Set `generation_kwargs={'stop_token_ids': ...}`, or "
    "leave it out",
    **dict.fromkeys(
        ("stop", "stop_token_ids"),
        "vLLM knows it, but transformers ignores it. Set `use_vllm=True`, or leave it out",
    ),
}
# The values with which an engine samples from the policy itself, and other names that do not change its distribution.
POLICY_VALUES: dict[str, tuple] = {"top_p": (1.0, None), "top_k": (0, -1), "min_p": (None, 0.0)}
POLICY_VALUES |= {"repetition_penalty": (1.0, None), "vllm_structured_outputs_regex": (None,)}
KEEPS_THE_DISTRIBUTION = {"eos_token_id", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"}
KEEPS_THE_DISTRIBUTION |= {"skip_special_tokens"}
DEFAULT_MAX_GEN_BATCHES, DEFAULT_REPLACE_RATIO, DEFAULT_LOG_GROUPS, DEFAULT_PENALTY_FACTOR = 10.0, 0.3, 4, 1.0


def is_length_penalty(name: str) -> bool:
    """Return whether a reward function measures length. If several functions have one name, a number follows it."""
    return re.sub(r"_\d+$", "", name) in LENGTH_PENALTIES


def _nearest_loss(s: SimpleNamespace) -> str | None:
    """Return the known loss that a misspelt one was meant to be. A loss with another name may be a user's own."""
    given = str(s.loss_type).lower()
    return None if s.loss_type in KNOWN_LOSSES else next(iter(get_close_matches(given, KNOWN_LOSSES, 1, 0.8)), None)


def _some_group_fits(s: SimpleNamespace) -> bool:
    low, high, G = s.dynamic_sampling_min_accuracy, s.dynamic_sampling_max_accuracy, s.num_generations
    return any(low < num_correct / G < high for num_correct in range(1, G))


def _may_hold_filler(s: SimpleNamespace) -> bool:
    ends = s.dynamic_sampling_max_gen_batches > 0 or s.dynamic_sampling_stop_after > 0
    return s.dynamic_sampling_mode == "mask" or (s.dynamic_sampling_on_exhausted == "top_up" and ends)


def _uses_a_server(s: SimpleNamespace) -> bool:
    return s.use_vllm and s.vllm_mode == "server"


def _carries(s: SimpleNamespace) -> bool:
    return s.use_dynamic_sampling and s.dynamic_sampling_surplus == "carry"


def _screens(s: SimpleNamespace) -> bool:
    return s.use_dynamic_sampling and s.dynamic_sampling_screen not in (None, "off")


def _generation_kwargs(s: SimpleNamespace) -> dict:
    return read_mapping("generation_kwargs", s.generation_kwargs) or {}  # on a command line they are text


def _is_supported(s: SimpleNamespace, name: str, value: Any) -> bool:
    """Return whether the engine knows the name, and still samples the requested number of completions."""
    if name in ("stop", "stop_token_ids"):
        return s.use_vllm or not value
    if name == "eos_token_id":
        return not s.use_vllm
    if name == "stop_strings":
        return not (s.use_vllm or value)
    if s.use_vllm:  # a request to a server is for several completions
        return s.vllm_mode == "colocate" and (name, value) == ("n", 1)
    if name == "num_beams":  # TRL's own tests sample with two beams
        return value == 1 or not s.use_transformers_continuous_batching
    return (name, value) in (("do_sample", True), ("num_return_sequences", 1), ("n", 1))


def _why_no_kwarg(s: SimpleNamespace) -> str | None:
    for name, value in _generation_kwargs(s).items():
        advice = UNSUPPORTED_GENERATION_KWARGS.get(name)
        if advice is not None and not _is_supported(s, name, value):
            return f"`generation_kwargs['{name}']={value!r}` is not supported. {advice}."
    return None


def _why_bad_stop(s: SimpleNamespace) -> str | None:
    """Return why the engine cannot end a completion at a stop in `generation_kwargs`, or `None`."""
    given = _generation_kwargs(s)
    for name, kind, is_one in (
        ("stop", "a text that is not empty, or a list of such texts", lambda x: isinstance(x, str) and x != ""),
        ("stop_token_ids", "a list of token ids", _is_token_id),
        ("eos_token_id", "a token id, or a list of them", _is_token_id),
    ):
        value = given.get(name)
        stops = value if isinstance(value, (list, tuple)) else [value]
        is_bare_id = name == "stop_token_ids" and not isinstance(value, (list, tuple))
        if value is not None and (is_bare_id or not all(map(is_one, stops))):
            return f"`generation_kwargs['{name}']={value!r}` is not supported. Give {kind}, or leave it out."
    if given.get("stop") and not given.get("detokenize", True):
        return (
            "`generation_kwargs['detokenize']=False` contradicts `generation_kwargs['stop']`, which vLLM searches for "
            "in the text. Leave out `detokenize`, or give the tokens with `stop_token_ids`."
        )
    return None


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def off_policy_settings(s: Any) -> dict[str, str]:
    """
    Return the settings with which an engine does not sample from the policy itself.

    Returns:
        `dict[str, str]`: Each of these settings with its value, and what to set instead.
    """
    found = {}
    for name, policy_values in POLICY_VALUES.items():
        value = getattr(s, name)
        if value not in policy_values:
            found[f"`{name}={value!r}`"] = f"`{name}={policy_values[0]}`"
    for name, value in _generation_kwargs(s).items():
        if name not in KEEPS_THE_DISTRIBUTION and value not in POLICY_VALUES.get(name, ()):
            found[f"`generation_kwargs['{name}']={value!r}`"] = f"no `generation_kwargs['{name}']`"
    return found


def _ruled_out(when: Callable[[SimpleNamespace], Any], why: str, name: str, *allowed: Any, **facts: Any) -> Rule:
    """Return the rule that a setting must have one of the allowed values when a condition holds."""
    return Rule(lambda s: when(s) and getattr(s, name) not in allowed, f"`{name}={{{name}!r}}` {why}", **facts)


def _no_effect_with_mask(name: str, *allowed: Any) -> Rule:
    """Return the rule that a setting must have one of the allowed values in mode "mask"."""
    values = [repr(value) for value in allowed if value is not None]
    instead = f", or set `{name}={values[0]}`" if values else ""  # a recipe's value cannot be left out
    why = (
        "has no effect with `dynamic_sampling_mode='mask'`, which samples every prompt once. Leave one of them out"
        f"{instead}."
    )
    return _ruled_out(lambda s: s.use_dynamic_sampling and s.dynamic_sampling_mode == "mask", why, name, *allowed)


_not_in_the_paper = partial(
    _ruled_out,
    lambda s: s.use_dynamic_sampling and s.dynamic_sampling_mode == "paper",
    "contradicts `dynamic_sampling_mode='paper'`, which samples whole groups, skips no prompt and discards the "
    "surplus. Leave it out, or set `dynamic_sampling_mode='filter'`.",
)
_no_rounds_ahead = partial(
    _ruled_out,
    lambda s: s.rollouts_ahead > 1,
    "has no effect with `rollouts_ahead={rollouts_ahead}`, which requests groups one by one, and their number "
    "according to the acceptance rate. Leave it out, or set `rollouts_ahead=1`.",
)
_no_effect_with_a_filter = partial(
    _ruled_out,
    lambda s: s.has_group_filter,
    "has no effect together with a `group_filter`, which alone decides which groups are accepted. Leave one of them "
    "out.",
    facts=("has_group_filter",),
)


def _needed_ahead(name: str, needed: Any) -> Rule:
    return Rule(
        lambda s: s.rollouts_ahead and getattr(s, name) not in (needed, None),
        f"`rollouts_ahead={{rollouts_ahead}}` needs `{name}={needed!r}`, got {{{name}!r}}: groups that are sampled "
        f"ahead are carried to later rollouts. Set `{name}={needed!r}`, or `rollouts_ahead=0`.",
    )


def _unsupported(when: Callable[[SimpleNamespace], Any], setting: str, advice: str, fact: str, what: str) -> Rule:
    return Rule(lambda s: when(s) and getattr(s, fact), f"`{setting}` does not support {what}. {advice}.", (fact,))


_not_ahead = partial(
    _unsupported, lambda s: s.rollouts_ahead, "rollouts_ahead={rollouts_ahead}", "Set `rollouts_ahead=0`"
)
_not_screened = partial(_unsupported, _screens, "dynamic_sampling_screen={dynamic_sampling_screen!r}", "Leave it out")


def _needs_correctness(name: str, when: Callable[[SimpleNamespace], Any]) -> Rule:
    """Return the rule that a setting cannot be used if no reward says which completions are correct."""
    message = f"`{name}={{{name}!r}}` {{why_no_correctness}}"
    return Rule(
        lambda s: s.use_dynamic_sampling and when(s) and s.why_no_correctness, message, ("why_no_correctness",)
    )


def _round_too_large(name: str, size_of: Callable[[SimpleNamespace], float]) -> Rule:
    return Rule(
        lambda s: (
            s.use_dynamic_sampling
            and not (s.use_vllm or s.use_transformers_continuous_batching)
            and size_of(s) > s.groups_per_rollout
        ),
        lambda s: (
            f"`{name}={getattr(s, name)}` asks for rounds of {size_of(s):g} prompts. Without vLLM or continuous "
            f"batching a round runs as one batch, which has at most {s.groups_per_rollout} prompts (the generation "
            "batch). Lower it, or set `use_vllm=True` or `use_transformers_continuous_batching=True`."
        ),
        ("groups_per_rollout",),
    )


def _rounds_trained_weights(setting: str, dtype: str) -> Rule:
    return Rule(
        lambda s: s.use_transformers_continuous_batching and getattr(s, setting) and s.trains_float32,
        f"`use_transformers_continuous_batching=True` with `{setting}=True` rounds the trained float32 weights to "
        f"{dtype} at every rollout, so small updates are lost. Set `{setting}=False`, or `use_vllm=True`, or "
        "`use_transformers_continuous_batching=False`.",
        ("trains_float32",),
    )


def why_punished_twice(
    buffer: int | None, reward_names: Sequence[str], reward_weights: Sequence[float] | None
) -> str | None:
    """Return which reward function punishes the completions that `overlong_buffer_length` punishes too, or `None`."""
    weights = reward_weights or [1.0] * len(reward_names)
    for name, weight in zip(reward_names, weights, strict=False):
        if buffer is not None and weight and is_length_penalty(name):
            return (
                f"`overlong_buffer_length={buffer}` punishes overlong completions, and so does the reward function "
                f"{name!r}: the completions would be punished twice. Leave out one of the two."
            )
    return None


# The rules are checked in this order, and the message is that of the first broken one.
RULES: tuple[Rule, ...] = (
    # ---- Which groups are accepted ----
    Rule(
        lambda s: not 0 <= s.dynamic_sampling_min_accuracy < s.dynamic_sampling_max_accuracy <= 1,
        "`dynamic_sampling_min_accuracy` must be less than `dynamic_sampling_max_accuracy`, and both must be between "
        "0 and 1, got {dynamic_sampling_min_accuracy} and {dynamic_sampling_max_accuracy}.",
    ),
    Rule(
        lambda s: not _some_group_fits(s),
        "No group of {num_generations} completions has an accuracy strictly between "
        "`dynamic_sampling_min_accuracy={dynamic_sampling_min_accuracy}` and "
        "`dynamic_sampling_max_accuracy={dynamic_sampling_max_accuracy}`: every group would be dropped. Move the two "
        "further apart, or raise `num_generations`.",
    ),
    Rule(
        lambda s: isinstance(s.dynamic_sampling_rewards, str),
        "`dynamic_sampling_rewards` must be a list of names, got the text {dynamic_sampling_rewards!r}. Write "
        "`[{dynamic_sampling_rewards!r}]`.",
    ),
    Rule(
        lambda s: s.dynamic_sampling_rewards is not None and not s.dynamic_sampling_rewards,
        "`dynamic_sampling_rewards` is empty, so no reward function would decide which groups are accepted. Name at "
        "least one, or leave the setting out for all functions except length penalties.",
    ),
    Rule(
        _nearest_loss,
        lambda s: (
            f"`loss_type={s.loss_type!r}` is unknown. Did you mean {_nearest_loss(s)!r}? The known losses are "
            f"{', '.join(map(repr, KNOWN_LOSSES))}."
        ),
    ),
    # ---- How prompts are sampled ----
    Rule(
        lambda s: not s.use_dynamic_sampling and s.max_tokens_generated is not None,
        "`max_tokens_generated={max_tokens_generated}` has no effect with `use_dynamic_sampling=False`: only dynamic "
        "sampling counts generated tokens. Set `max_steps` instead.",
    ),
    _no_effect_with_mask("dynamic_sampling_on_exhausted", "top_up"),
    _no_effect_with_mask("dynamic_sampling_surplus", None, "discard"),
    _no_effect_with_mask("dynamic_sampling_max_gen_batches", DEFAULT_MAX_GEN_BATCHES, 1),
    _no_effect_with_mask("dynamic_sampling_max_round_size", None),
    _no_effect_with_mask("dynamic_sampling_screen", None, "off"),
    _no_effect_with_mask("batch_multiplier", None),
    _not_in_the_paper("dynamic_sampling_surplus", None, "discard"),
    _not_in_the_paper("dynamic_sampling_memory", None, False),
    _not_in_the_paper("dynamic_sampling_screen", None, "off"),
    _ruled_out(
        lambda s: s.use_dynamic_sampling and s.dynamic_sampling_mode != "replace",
        "has no effect with `dynamic_sampling_mode={dynamic_sampling_mode!r}`. Set `dynamic_sampling_mode='replace'`.",
        "min_replace_ratio",
        DEFAULT_REPLACE_RATIO,
    ),
    _ruled_out(
        lambda s: s.use_dynamic_sampling and s.num_generations == 2,
        "has no effect with `num_generations=2`: at least two completions are sampled first, which is the whole "
        "group. Leave it out, or raise `num_generations`.",
        "dynamic_sampling_screen",
        None,
        "off",
    ),
    Rule(
        lambda s: s.dynamic_sampling_screen not in (None, "auto", "on", "off", *map(str, range(2, s.num_generations))),
        "`dynamic_sampling_screen` must be 'auto', 'on', 'off', or a number of at least 2 and less than "
        "`num_generations` ({num_generations}), got {dynamic_sampling_screen!r}.",
    ),
    _not_screened("has_group_filter", "a `group_filter`, which decides on whole groups"),
    _not_screened("has_rollout_func", "a `rollout_func`, which samples whole groups"),
    _not_screened(
        "has_environments",
        "environments: a group is scored when it is whole, and the environments of its first completions no longer "
        "exist by then",
    ),
    Rule(
        lambda s: _carries(s) and s.dynamic_sampling_mode == "replace",
        "`dynamic_sampling_surplus='carry'` contradicts `dynamic_sampling_mode='replace'`, which stops before there "
        "is a surplus. Set `dynamic_sampling_surplus='discard'`, or `dynamic_sampling_mode='filter'`.",
    ),
    Rule(
        lambda s: _carries(s) and s.loss_type != "dapo",
        "`dynamic_sampling_surplus='carry'` needs `loss_type='dapo'`, got {loss_type!r}: TRL's other losses cannot "
        "mix rows of two policies. Set `dynamic_sampling_surplus='discard'`.",
    ),
    Rule(
        lambda s: s.use_dynamic_sampling and s.loss_type not in KNOWN_LOSSES and _may_hold_filler(s),
        f"`loss_type={{loss_type!r}}` is not one of {', '.join(map(repr, KNOWN_LOSSES))}: rows that only fill an "
        "incomplete batch could change another loss. Set one of these losses, or `dynamic_sampling_mode='filter'` "
        "with `dynamic_sampling_on_exhausted='error'`, or `use_dynamic_sampling=False`.",
    ),
    # ---- vLLM's server ----
    Rule(
        lambda s: s.vllm_request_timeout is not None and not _uses_a_server(s),
        "`vllm_request_timeout={vllm_request_timeout}` has no effect without a vLLM server. Leave it out, or set "
        "`use_vllm=True` and `vllm_mode='server'`.",
    ),
    Rule(
        lambda s: s.rollouts_ahead and not _uses_a_server(s),
        lambda s: (
            f"`rollouts_ahead={s.rollouts_ahead}` needs a vLLM server on GPUs of its own, got "
            f"{f'`vllm_mode={s.vllm_mode!r}`' if s.use_vllm else 'generation with transformers'}, which samples on "
            "the GPUs that train. Set `use_vllm=True` and `vllm_mode='server'`, or `rollouts_ahead=0`."
        ),
    ),
    _needed_ahead("use_dynamic_sampling", True),
    _needed_ahead("dynamic_sampling_mode", "filter"),
    _needed_ahead("dynamic_sampling_surplus", "carry"),
    _needed_ahead("loss_type", "dapo"),
    Rule(
        lambda s: s.rollouts_ahead and off_policy_settings(s),
        lambda s: (
            f"`rollouts_ahead={s.rollouts_ahead}` contradicts {next(iter(off_policy_settings(s)))}: completions that "
            "are sampled ahead are trained on with the server's log-probabilities, which would not be the policy's. "
            "Leave the latter out, or set `rollouts_ahead=0`."
        ),
    ),
    _no_rounds_ahead("batch_multiplier", None),
    _no_rounds_ahead("dynamic_sampling_max_round_size", None),
    Rule(_why_no_kwarg),
    Rule(_why_bad_stop),
    # ---- Overlong completions ----
    Rule(
        lambda s: s.overlong_buffer_length is not None and s.max_completion_length is None,
        "`overlong_buffer_length={overlong_buffer_length}` needs a `max_completion_length`, below which the "
        "punishment begins, got `None`. Set a number, such as TRL's default, 512.",
    ),
    Rule(
        lambda s: s.max_completion_length is None and s.use_transformers_continuous_batching,
        "`max_completion_length=None` means no limit with continuous batching: a completion that does not end would "
        "be sampled until the cache is full. Set a number, such as TRL's default, 512.",
    ),
    Rule(
        lambda s: s.max_completion_length is None and not s.use_vllm,
        "With `max_completion_length=None` transformers samples 20 tokens, its own default. Set a number, such as "
        "TRL's default, 512. Only with `use_vllm=True` does `None` mean the rest of the model's context.",
    ),
    Rule(
        lambda s: s.max_completion_length is None and s.loss_type == "dr_grpo",
        "`loss_type='dr_grpo'` divides by `max_completion_length`, which is `None`. Set a number, such as TRL's "
        "default, 512.",
    ),
    Rule(
        lambda s: s.overlong_buffer_length is not None and s.overlong_buffer_length > s.max_completion_length,
        "`overlong_buffer_length` must be between 1 and `max_completion_length` ({max_completion_length}), got "
        "{overlong_buffer_length}.",
    ),
    Rule(
        lambda s: s.overlong_penalty_factor != DEFAULT_PENALTY_FACTOR and s.overlong_buffer_length is None,
        "`overlong_penalty_factor={overlong_penalty_factor}` has no effect without `overlong_buffer_length`. Set "
        "`overlong_buffer_length`. The paper uses a fifth of `max_completion_length`.",
    ),
    Rule(
        lambda s: s.overlong_filtering is False and s.mask_truncated_completions,
        "`overlong_filtering=False` contradicts `mask_truncated_completions=True`: they are two names of one setting. "
        "Set only one of them.",
    ),
    # ---- Micro-batches, LoRA, reward scaling, the ledger ----
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.loss_type != "dapo",
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` needs `loss_type='dapo'`, got {loss_type!r}: the "
        "value of TRL's other losses depends on how rows are divided into micro-batches. Leave it out, and limit "
        "memory with `per_device_train_batch_size`.",
    ),
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.top_entropy_quantile < 1.0,
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` contradicts "
        "`top_entropy_quantile={top_entropy_quantile}`: the quantile is taken over each micro-batch, and would change "
        "with its size. Set `top_entropy_quantile=1.0`, or limit memory with `per_device_train_batch_size` instead.",
    ),
    Rule(
        lambda s: s.loss_type == "dapo" and s.optim and s.optim.endswith(("lomo", "_layerwise")),
        "`optim='{optim}'` changes the weights during every backward pass. Each micro-batch would be a step of its "
        "own, but the loss is a mean over the tokens of all of them. Set another optimizer, such as "
        "`optim='adafactor'` or `optim='apollo_adamw'`.",
    ),
    _ruled_out(lambda s: not s.use_vllm, "has no effect without vLLM. Set `use_vllm=True`.", "vllm_lora_sync", None),
    Rule(
        lambda s: s.reward_scaling is not None and len(s.reward_scaling) != 4,
        "`reward_scaling` must be four numbers (source minimum, source maximum, target minimum and target maximum), "
        "got {reward_scaling}. To map rewards from 0 to 1 to the range from -1 to 1, write `[0, 1, -1, 1]`.",
    ),
    Rule(lambda s: s.reward_scaling and why_unscalable(*s.reward_scaling)),
    Rule(
        lambda s: s.log_groups != DEFAULT_LOG_GROUPS and not s.use_dynamic_sampling,
        "`log_groups={log_groups}` has no effect with `use_dynamic_sampling=False`, which writes no ledger. Set "
        "`use_dynamic_sampling=True`, or leave `log_groups` out.",
    ),
    # ---- Once the batch sizes are known ----
    Rule(
        lambda s: (
            s.use_dynamic_sampling and s.batch_multiplier is not None and s.batch_multiplier * s.groups_per_rollout < 1
        ),
        lambda s: (
            f"`batch_multiplier={s.batch_multiplier}` asks for rounds of less than one prompt, because a rollout "
            f"batch has {s.groups_per_rollout}. Raise it to at least {1 / s.groups_per_rollout:.3g}."
        ),
        ("groups_per_rollout",),
    ),
    Rule(
        lambda s: s.use_dynamic_sampling and 0 < s.dynamic_sampling_max_gen_batches < (s.batch_multiplier or 0),
        "With `batch_multiplier={batch_multiplier:g}` each round samples that many batches, but "
        "`dynamic_sampling_max_gen_batches={dynamic_sampling_max_gen_batches:g}` allows fewer per rollout. Lower the "
        "former or raise the latter. verl and NeMo RL count rounds instead of batches: their 10 correspond to "
        "{batch_multiplier:g} x 10 batches here.",
    ),
    _round_too_large("dynamic_sampling_max_round_size", lambda s: s.dynamic_sampling_max_round_size or 0),
    _round_too_large("batch_multiplier", lambda s: (s.batch_multiplier or 0) * s.groups_per_rollout),
    # ---- Once the model, the processes and the trainer's arguments are known ----
    Rule(
        lambda s: s.max_completion_length is None and s.has_tools,
        "`max_completion_length=None` is not supported with tools, whose results count as part of a completion. Set a "
        "number, such as TRL's default, 512.",
        ("has_tools",),
    ),
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.has_images,
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` does not support models with images, whose rows "
        "cannot be divided into micro-batches again. Leave it out, and limit memory with "
        "`per_device_train_batch_size`.",
        ("has_images",),
    ),
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.num_ranks_sharing_a_row > 1,
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` needs each process to have rows of its own, but "
        "{num_ranks_sharing_a_row} processes share a row (tensor, context or sequence parallelism). Use data "
        "parallelism (DDP, FSDP, ZeRO), or leave it out.",
        ("num_ranks_sharing_a_row",),
    ),
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.why_padding_matters is not None,
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` does not work with this model, whose outputs depend "
        "on the padding: {why_padding_matters}. Leave it out, and limit memory with `per_device_train_batch_size`.",
        ("why_padding_matters",),
    ),
    Rule(
        lambda s: _carries(s) and s.loss_type == "dapo" and s.why_padding_matters is not None,
        "`dynamic_sampling_surplus='carry'` does not work with this model, whose log-probabilities depend on the "
        "padding: the padding of a row changes when it is carried to another rollout. Set "
        "`dynamic_sampling_surplus='discard'`.",
        ("why_padding_matters",),
    ),
    Rule(
        lambda s: s.has_group_filter and not s.use_dynamic_sampling,
        "A `group_filter` has no effect with `use_dynamic_sampling=False`. Leave it out, or set "
        "`use_dynamic_sampling=True`.",
        ("has_group_filter",),
    ),
    _no_effect_with_a_filter("dynamic_sampling_min_accuracy", 0.0, None),
    _no_effect_with_a_filter("dynamic_sampling_max_accuracy", 1.0, None),
    _no_effect_with_a_filter("dynamic_sampling_memory", False, None),
    _needs_correctness("dynamic_sampling_memory", lambda s: s.dynamic_sampling_memory),
    _needs_correctness("dynamic_sampling_screen", lambda s: s.dynamic_sampling_screen in ("auto", "on")),
    _not_ahead("has_rollout_func", "a `rollout_func`, which sends its own requests to the server"),
    _not_ahead("has_environments", "environments, which are reset when their round begins"),
    _not_ahead("has_tools", "tools, which are called between two requests"),
    _not_ahead("has_images", "models with images, which a checkpoint cannot store"),
    _not_ahead(
        "is_quantized", "a base model in 4 or 8 bits, because the server's log-probabilities differ from the model's"
    ),
    _rounds_trained_weights("bf16", "bfloat16"),
    _rounds_trained_weights("fp16", "float16"),
    Rule(
        lambda s: s.use_dynamic_sampling and s.num_ranks_sharing_a_row > 1,
        "Dynamic sampling needs each process to have rows of its own, but {num_ranks_sharing_a_row} processes share a "
        "row (tensor, context or sequence parallelism). Use data parallelism (DDP, FSDP, ZeRO), or set "
        "`use_dynamic_sampling=False`.",
        ("num_ranks_sharing_a_row",),
    ),
    Rule(
        lambda s: _carries(s) and s.has_images,
        "`dynamic_sampling_surplus='carry'` does not support models with images, which a checkpoint cannot store. Set "
        "`dynamic_sampling_surplus='discard'`.",
        ("has_images",),
    ),
)


def why_refused(settings: Any, **facts: Any) -> str | None:
    """
    Return the message of the first broken rule, or `None`.

    Args:
        settings:
            The fields of a config, or of a plan's recipe.
        **facts:
            What is known besides the settings. Without facts, the rules that need no facts are checked. With facts,
            the rules are checked that need some of these facts and no others.
    """
    known = SimpleNamespace(**{**vars(settings), **facts})
    for rule in RULES:
        is_checked = facts.keys() >= {*rule.facts} if rule.facts else not facts
        if not is_checked:
            continue
        broken = rule.breaks(known)
        if not broken:
            continue
        if rule.message is None:
            return broken
        return rule.message.format_map(vars(known)) if isinstance(rule.message, str) else rule.message(known)
    return None


def check_rules(settings: Any, **facts: Any) -> None:
    """Raise a `ValueError` with the message of the first broken rule."""
    if (message := why_refused(settings, **facts)) is not None:
        raise ValueError(message)
