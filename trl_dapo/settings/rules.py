# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules: which settings contradict each other, when, why, and what to do instead. Pure functions: a plan uses them
too, without torch.

Allowed values of single settings are in `ranges.py`, and sizes that do not divide in `batch_sizes.py`.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from .arguments import read_mapping
from .ranges import why_unscalable


# Begins the reason for which a setting is refused or off if nothing says which completions are correct.
NEEDS_CORRECTNESS = "needs to know which completions are correct"


class Rule(NamedTuple):
    """The check of one namespace of settings and facts."""

    breaks: Callable[[SimpleNamespace], Any]
    # The value, the reason, the way out; `{name}` is one of either. Without one, `breaks` returns it.
    message: str | Callable[[SimpleNamespace], str] | None = None
    facts: tuple[str, ...] = ()  # what must be known besides the settings


# Those that leave out rows which only fill a rollout; `update/loss.py` says how each divides.
KNOWN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo", "bnpo", "cispo", "vespo", "dapo")

# Reward functions that measure length, ours and TRL's: they never decide which groups train.
LENGTH_PENALTIES = ("soft_overlong_punishment", "soft_overlong_punishment_reward")

# Keys that `generation_kwargs` may not contain, and what to set instead.
NO_GENERATION_KWARGS = {
    **dict.fromkeys(("n", "best_of", "num_return_sequences"), "Set `num_generations`"),
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "Set `max_completion_length`"),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "Leave it out: those of the sampled tokens are asked for"),
    **dict.fromkeys(("do_sample", "num_beams"), "Leave it out: every completion is sampled"),
    "temperature": "Set `temperature`, which the log-probabilities in training take too",
    "seed": "Leave it out: with it all completions of a prompt are the same. `seed` of the settings is another",
    "stop_strings": "vLLM calls it `stop`, and transformers needs a tokenizer that `GRPOTrainer` does not hand to it. "
    "Set `use_vllm=True` and `generation_kwargs={'stop': ...}`, or leave it out",
    "eos_token_id": "It is transformers', and vLLM does not know it. Set `generation_kwargs={'stop_token_ids': ...}`, "
    "or leave it out",
    **dict.fromkeys(
        ("stop", "stop_token_ids"), "It is vLLM's, and transformers ignores it. Set `use_vllm=True`, or leave it out"
    ),
}
# The values with which an engine samples from the policy itself, and what else does not change its distribution.
OF_THE_POLICY: dict[str, tuple] = {"top_p": (1.0, None), "top_k": (0, -1), "min_p": (None, 0.0)}
OF_THE_POLICY |= {"repetition_penalty": (1.0, None), "vllm_structured_outputs_regex": (None,)}
LEAVES_THE_DISTRIBUTION = {"eos_token_id", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"}
LEAVES_THE_DISTRIBUTION |= {"skip_special_tokens"}
DEFAULT_MAX_GEN_BATCHES, DEFAULT_REPLACE_RATIO, DEFAULT_LOG_GROUPS, DEFAULT_PENALTY_FACTOR = 10.0, 0.3, 4, 1.0


def is_length_penalty(name: str) -> bool:
    """Whether a reward function measures length; of several with one name each has a number."""
    return re.sub(r"_\d+$", "", name) in LENGTH_PENALTIES


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
    return read_mapping("generation_kwargs", s.generation_kwargs) or {}  # a command line's are text


def _is_taken(s: SimpleNamespace, name: str, value: Any) -> bool:
    """Whether the engine knows the name, and still samples the requested number of completions."""
    if name in ("stop", "stop_token_ids"):
        return s.use_vllm or not value
    if name == "eos_token_id":
        return not s.use_vllm
    if name == "stop_strings":
        return not (s.use_vllm or value)
    if s.use_vllm:  # whose server is asked for several at once
        return s.vllm_mode == "colocate" and (name, value) == ("n", 1)
    if name == "num_beams":  # TRL's own tests have two, sampled
        return value == 1 or not s.use_transformers_continuous_batching
    return (name, value) in (("do_sample", True), ("num_return_sequences", 1), ("n", 1))


def _why_no_kwarg(s: SimpleNamespace) -> str | None:
    for name, value in _generation_kwargs(s).items():
        if (way_out := NO_GENERATION_KWARGS.get(name)) is not None and not _is_taken(s, name, value):
            return f"`generation_kwargs['{name}']={value!r}` is not supported. {way_out}."
    return None


def _why_bad_stop(s: SimpleNamespace) -> str | None:
    """Why a stop of `generation_kwargs` is not one that the engine can end a completion at."""
    given = _generation_kwargs(s)
    for name, kind, is_one in (
        ("stop", "text that is not empty, or a list of such texts", lambda x: isinstance(x, str) and x != ""),
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
            "`generation_kwargs['detokenize']=False` contradicts `generation_kwargs['stop']`, which vLLM looks for in "
            "the text. Leave out `detokenize`, or name the tokens with `stop_token_ids`."
        )
    return None


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def off_the_policy(s: Any) -> dict[str, str]:
    """
    Return the settings that make an engine's distribution differ from the policy's, with their values and what to do
    instead.
    """
    moved = {}
    for name, same in OF_THE_POLICY.items():
        value = getattr(s, name)
        if value not in same:
            moved[f"`{name}={value!r}`"] = f"`{name}={same[0]}`"
    for name, value in _generation_kwargs(s).items():
        if name not in LEAVES_THE_DISTRIBUTION and value not in OF_THE_POLICY.get(name, ()):
            moved[f"`generation_kwargs['{name}']={value!r}`"] = f"no `generation_kwargs['{name}']`"
    return moved


def _ruled_out(where: Callable[[SimpleNamespace], Any], said: str, name: str, *harmless: Any, **facts: Any) -> Rule:
    """A setting that others rule out, unless it has one of these values."""
    return Rule(lambda s: where(s) and getattr(s, name) not in harmless, f"`{name}={{{name}!r}}` {said}", **facts)


_idle_with_mask = partial(
    _ruled_out,
    lambda s: s.use_dynamic_sampling and s.dynamic_sampling_mode == "mask",
    "has no effect with `dynamic_sampling_mode='mask'`, which samples every prompt once. Leave one of them out.",
)
_not_in_the_paper = partial(
    _ruled_out,
    lambda s: s.use_dynamic_sampling and s.dynamic_sampling_mode == "paper",
    "contradicts `dynamic_sampling_mode='paper'`, which asks for whole groups of every prompt and discards the "
    "surplus. Leave it out, or use `dynamic_sampling_mode='filter'`.",
)
_no_rounds_ahead = partial(
    _ruled_out,
    lambda s: s.rollouts_ahead > 1,
    "has no effect with `rollouts_ahead={rollouts_ahead}`, which asks for groups one by one, as many as the "
    "acceptance rate says. Leave it out, or set `rollouts_ahead=1`.",
)
_idle_beside_a_filter = partial(
    _ruled_out,
    lambda s: s.has_group_filter,
    "has no effect together with a `group_filter`, which alone decides which groups train. Leave one of them out.",
    facts=("has_group_filter",),
)


def _needed_ahead(name: str, needed: Any) -> Rule:
    return Rule(
        lambda s: s.rollouts_ahead and getattr(s, name) not in (needed, None),
        f"`rollouts_ahead={{rollouts_ahead}}` needs `{name}={needed!r}`, got {{{name}!r}}: what is sampled ahead "
        "is carried, and fills batches to come. Set it, or `rollouts_ahead=0`.",
    )


def _unsupported(asked: Callable[[SimpleNamespace], Any], said: str, way_out: str, fact: str, what: str) -> Rule:
    return Rule(lambda s: asked(s) and getattr(s, fact), f"`{said}` does not support {what}. {way_out}.", (fact,))


_not_ahead = partial(
    _unsupported, lambda s: s.rollouts_ahead, "rollouts_ahead={rollouts_ahead}", "Set `rollouts_ahead=0`"
)
_not_screened = partial(_unsupported, _screens, "dynamic_sampling_screen={dynamic_sampling_screen!r}", "Leave it out")


def _needs_correctness(name: str, asked: Callable[[SimpleNamespace], Any]) -> Rule:
    """Return what needs to know which completions are correct if no reward says so."""
    said = f"`{name}={{{name}!r}}` {{why_no_correctness}}"
    return Rule(lambda s: s.use_dynamic_sampling and asked(s) and s.why_no_correctness, said, ("why_no_correctness",))


def _round_too_large(name: str, size_of: Callable[[SimpleNamespace], float]) -> Rule:
    return Rule(
        lambda s: (
            s.use_dynamic_sampling
            and not (s.use_vllm or s.use_transformers_continuous_batching)
            and size_of(s) > s.groups_per_rollout
        ),
        lambda s: (
            f"`{name}={getattr(s, name)}` asks for rounds of {size_of(s):g} prompts, but without vLLM or continuous "
            f"batching a round runs as one batch and holds at most the generation batch, {s.groups_per_rollout} "
            "prompts. Lower it, or set `use_vllm=True` or `use_transformers_continuous_batching=True`."
        ),
        ("groups_per_rollout",),
    )


def _rounds_what_trains(given: str, dtype: str) -> Rule:
    return Rule(
        lambda s: s.use_transformers_continuous_batching and getattr(s, given) and s.trains_float32,
        f"`use_transformers_continuous_batching=True` with `{given}=True` rounds the float32 weights that train to "
        f"{dtype} at every rollout: small steps are lost. Set `{given}=False`, or sample with `use_vllm=True`, or "
        "without either.",
        ("trains_float32",),
    )


def why_punished_twice(
    buffer: int | None, reward_names: Sequence[str], reward_weights: Sequence[float] | None
) -> str | None:
    """Say which reward function punishes overlong completions that `overlong_buffer_length` punishes too."""
    weights = reward_weights or [1.0] * len(reward_names)
    for name, weight in zip(reward_names, weights, strict=False):
        if buffer is not None and weight and is_length_penalty(name):
            return (
                f"`overlong_buffer_length={buffer}` punishes overlong completions, and so does the reward function "
                f"{name!r}: they would be punished twice. Leave out one of them."
            )
    return None


# In the order in which they are asked: a user is told of the first that is broken.
RULES: tuple[Rule, ...] = (
    # ---- Which groups train ----
    Rule(
        lambda s: not 0 <= s.dynamic_sampling_min_accuracy < s.dynamic_sampling_max_accuracy <= 1,
        "`dynamic_sampling_min_accuracy` and `dynamic_sampling_max_accuracy` must satisfy 0 <= min < max <= 1, got "
        "{dynamic_sampling_min_accuracy} and {dynamic_sampling_max_accuracy}.",
    ),
    Rule(
        lambda s: not _some_group_fits(s),
        "No group of {num_generations} completions has an accuracy strictly between "
        "`dynamic_sampling_min_accuracy={dynamic_sampling_min_accuracy}` and "
        "`dynamic_sampling_max_accuracy={dynamic_sampling_max_accuracy}`: every group would be dropped. Widen the "
        "band or raise `num_generations`.",
    ),
    Rule(
        lambda s: isinstance(s.dynamic_sampling_rewards, str),
        "`dynamic_sampling_rewards` must be a list of names, got the text {dynamic_sampling_rewards!r}. Write "
        "`[{dynamic_sampling_rewards!r}]`.",
    ),
    Rule(
        lambda s: s.dynamic_sampling_rewards is not None and not s.dynamic_sampling_rewards,
        "`dynamic_sampling_rewards` is empty: no reward function would decide. Name at least one, or leave it `None` "
        "for all but the length penalty.",
    ),
    # ---- How prompts are sampled ----
    Rule(
        lambda s: not s.use_dynamic_sampling and s.max_tokens_generated is not None,
        "`max_tokens_generated={max_tokens_generated}` is counted by dynamic sampling, which "
        "`use_dynamic_sampling=False` turns off. Set `max_steps` instead.",
    ),
    _idle_with_mask("dynamic_sampling_on_exhausted", "top_up"),
    _idle_with_mask("dynamic_sampling_surplus", None, "discard"),
    _idle_with_mask("dynamic_sampling_max_gen_batches", DEFAULT_MAX_GEN_BATCHES, 1),
    _idle_with_mask("dynamic_sampling_max_round_size", None),
    _idle_with_mask("dynamic_sampling_screen", None, "off"),
    _idle_with_mask("batch_multiplier", None),
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
        "has no effect with `num_generations=2`: a group of two has no first few. Leave it out.",
        "dynamic_sampling_screen",
        None,
        "off",
    ),
    Rule(
        lambda s: s.dynamic_sampling_screen not in (None, "auto", "on", "off", *map(str, range(2, s.num_generations))),
        "`dynamic_sampling_screen` must be 'auto', 'on', 'off', or a number of at least 2 and below `num_generations` "
        "({num_generations}), got {dynamic_sampling_screen!r}.",
    ),
    _not_screened("has_group_filter", "a `group_filter`, which is asked of whole groups"),
    _not_screened("has_rollout_func", "a `rollout_func`, which makes whole groups"),
    _not_screened(
        "has_environments",
        "environments: a group is scored when it is whole, and those of its first completions are gone by then",
    ),
    Rule(
        lambda s: _carries(s) and s.dynamic_sampling_mode == "replace",
        "`dynamic_sampling_surplus='carry'` contradicts `dynamic_sampling_mode='replace'`, which stops before there "
        "is a surplus. Use `dynamic_sampling_mode='filter'`.",
    ),
    Rule(
        lambda s: _carries(s) and s.loss_type != "dapo",
        "`dynamic_sampling_surplus='carry'` needs `loss_type='dapo'`, got {loss_type!r}: TRL's other losses cannot "
        "mix rows of two policies. Set `dynamic_sampling_surplus='discard'`.",
    ),
    Rule(
        lambda s: s.use_dynamic_sampling and s.loss_type not in KNOWN_LOSSES and _may_hold_filler(s),
        f"`loss_type={{loss_type!r}}` is none of {', '.join(map(repr, KNOWN_LOSSES))}: rows that fill a rollout which "
        "fell short would weigh in it. Use one of these, or `dynamic_sampling_mode='filter'` with "
        "`dynamic_sampling_on_exhausted='error'`, or `use_dynamic_sampling=False`.",
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
            f"{f'`vllm_mode={s.vllm_mode!r}`' if s.use_vllm else 'transformers generation'}, which samples on those "
            "that train. Set `use_vllm=True` and `vllm_mode='server'`, or `rollouts_ahead=0`."
        ),
    ),
    _needed_ahead("use_dynamic_sampling", True),
    _needed_ahead("dynamic_sampling_mode", "filter"),
    _needed_ahead("dynamic_sampling_surplus", "carry"),
    _needed_ahead("loss_type", "dapo"),
    Rule(
        lambda s: s.rollouts_ahead and off_the_policy(s),
        lambda s: (
            f"`rollouts_ahead={s.rollouts_ahead}` contradicts {next(iter(off_the_policy(s)))}: what is sampled ahead "
            "trains with the server's log-probabilities, which then are not the policy's. Leave it out, or set "
            "`rollouts_ahead=0`."
        ),
    ),
    _no_rounds_ahead("batch_multiplier", None),
    _no_rounds_ahead("dynamic_sampling_max_round_size", None),
    Rule(_why_no_kwarg),
    Rule(_why_bad_stop),
    # ---- Overlong completions ----
    Rule(
        lambda s: s.overlong_buffer_length is not None and s.max_completion_length is None,
        "`overlong_buffer_length={overlong_buffer_length}` needs a `max_completion_length`: the punishment is "
        "measured from it.",
    ),
    Rule(
        lambda s: s.max_completion_length is None and s.use_transformers_continuous_batching,
        "`max_completion_length=None` sets no limit with continuous batching: a completion that does not end would be "
        "sampled until its cache is full. Set a number, such as TRL's default, 512.",
    ),
    Rule(
        lambda s: s.max_completion_length is None and not s.use_vllm,
        "`max_completion_length=None` has transformers sample 20 tokens, its own default. Set a number, such as TRL's "
        "default, 512. Only with `use_vllm=True` does `None` mean the rest of vLLM's window.",
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
        "`overlong_penalty_factor={overlong_penalty_factor}` has no effect without `overlong_buffer_length`. Set the "
        "buffer (the paper: a fifth of `max_completion_length`).",
    ),
    Rule(
        lambda s: s.overlong_filtering is False and s.mask_truncated_completions,
        "`overlong_filtering=False` contradicts `mask_truncated_completions=True`: they are two names of one setting. "
        "Set only one of them.",
    ),
    # ---- Micro-batches, LoRA, reward scaling, the ledger ----
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.loss_type != "dapo",
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` needs `loss_type='dapo'`, got {loss_type!r}: TRL's "
        "other losses change with the micro-batches. Leave it out, and bound memory by "
        "`per_device_train_batch_size`.",
    ),
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.top_entropy_quantile < 1.0,
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` contradicts "
        "`top_entropy_quantile={top_entropy_quantile}`: a quantile over each micro-batch would change with them. Set "
        "`top_entropy_quantile=1.0`, or bound memory by `per_device_train_batch_size`.",
    ),
    Rule(
        lambda s: s.loss_type == "dapo" and s.optim and s.optim.endswith(("lomo", "_layerwise")),
        "`optim='{optim}'` steps inside every backward pass: each micro-batch would be a step of its own, where the "
        "loss is a mean over the tokens of all of them. Set another, such as `optim='adafactor'` or "
        "`optim='apollo_adamw'`.",
    ),
    _ruled_out(lambda s: not s.use_vllm, "has no effect without vLLM. Set `use_vllm=True`.", "vllm_lora_sync", None),
    Rule(
        lambda s: s.reward_scaling is not None and len(s.reward_scaling) != 4,
        "`reward_scaling` takes four numbers, source minimum, source maximum, target minimum and target maximum; got "
        "{reward_scaling}.",
    ),
    Rule(lambda s: s.reward_scaling and why_unscalable(*s.reward_scaling)),
    Rule(
        lambda s: s.log_groups != DEFAULT_LOG_GROUPS and not s.use_dynamic_sampling,
        "`log_groups={log_groups}` has no effect with `use_dynamic_sampling=False`, which keeps no ledger. Set "
        "`use_dynamic_sampling=True`, or leave `log_groups` out.",
    ),
    # ---- Once the batch sizes are known ----
    Rule(
        lambda s: (
            s.use_dynamic_sampling
            and s.batch_multiplier is not None
            and int(s.batch_multiplier * s.groups_per_rollout) < 1
        ),
        lambda s: (
            f"`batch_multiplier={s.batch_multiplier}` asks for rounds of less than one prompt, with a rollout batch "
            f"of {s.groups_per_rollout}. Raise it to at least {1 / s.groups_per_rollout:.3g}."
        ),
        ("groups_per_rollout",),
    ),
    Rule(
        lambda s: s.use_dynamic_sampling and 0 < s.dynamic_sampling_max_gen_batches < (s.batch_multiplier or 0),
        "`batch_multiplier={batch_multiplier:g}` samples that many batches in each round, but "
        "`dynamic_sampling_max_gen_batches={dynamic_sampling_max_gen_batches:g}` allows a rollout fewer. Lower the "
        "former or raise the latter; verl and NeMo RL count rounds: 10 of theirs are {batch_multiplier:g} x 10 "
        "batches.",
    ),
    _round_too_large("dynamic_sampling_max_round_size", lambda s: s.dynamic_sampling_max_round_size or 0),
    _round_too_large("batch_multiplier", lambda s: (s.batch_multiplier or 0) * s.groups_per_rollout),
    # ---- Once the model, the ranks and what a user handed over are known ----
    Rule(
        lambda s: s.max_completion_length is None and s.has_tools,
        "`max_completion_length=None` does not support tools, whose results count as part of a completion. Set a "
        "number, such as TRL's default, 512.",
        ("has_tools",),
    ),
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.has_images,
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` does not support models with images, whose rows "
        "cannot be cut again. Leave it out, and bound memory by `per_device_train_batch_size`.",
        ("has_images",),
    ),
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.num_ranks_sharing_a_row > 1,
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` needs ranks of which each has rows of its own, but "
        "{num_ranks_sharing_a_row} ranks share a row (tensor, context or sequence parallelism). Use data parallelism "
        "(DDP, FSDP, ZeRO), or leave it out.",
        ("num_ranks_sharing_a_row",),
    ),
    Rule(
        lambda s: s.max_tokens_per_microbatch is not None and s.feels_padding is not None,
        "`max_tokens_per_microbatch={max_tokens_per_microbatch}` does not work for this model, which depends on its "
        "padding: {feels_padding}. Leave it out, and bound memory by `per_device_train_batch_size`.",
        ("feels_padding",),
    ),
    Rule(
        lambda s: _carries(s) and s.loss_type == "dapo" and s.feels_padding is not None,
        "`dynamic_sampling_surplus='carry'` does not work for this model, whose log-probabilities depend on the "
        "padding: a row has other padding in the rollout that it is carried to. Set "
        "`dynamic_sampling_surplus='discard'`.",
        ("feels_padding",),
    ),
    Rule(
        lambda s: s.has_group_filter and not s.use_dynamic_sampling,
        "A `group_filter` has no effect with `use_dynamic_sampling=False`. Leave it out, or set "
        "`use_dynamic_sampling=True`.",
        ("has_group_filter",),
    ),
    _idle_beside_a_filter("dynamic_sampling_min_accuracy", 0.0, None),
    _idle_beside_a_filter("dynamic_sampling_max_accuracy", 1.0, None),
    _idle_beside_a_filter("dynamic_sampling_memory", False, None),
    _needs_correctness("dynamic_sampling_memory", lambda s: s.dynamic_sampling_memory),
    _needs_correctness("dynamic_sampling_screen", lambda s: s.dynamic_sampling_screen in ("auto", "on")),
    _not_ahead("has_rollout_func", "a `rollout_func`, which asks the server itself"),
    _not_ahead("has_environments", "environments, which are reset when their round begins"),
    _not_ahead("has_tools", "tools, which are called between two requests"),
    _not_ahead("has_images", "models with images, which a checkpoint cannot hold"),
    _not_ahead("is_quantized", "a base in 4 or 8 bits, whose log-probabilities on a server are others"),
    _rounds_what_trains("bf16", "bfloat16"),
    _rounds_what_trains("fp16", "float16"),
    Rule(
        lambda s: s.use_dynamic_sampling and s.num_ranks_sharing_a_row > 1,
        "Dynamic sampling needs ranks of which each has rows of its own, but {num_ranks_sharing_a_row} ranks share a "
        "row (tensor, context or sequence parallelism). Use data parallelism (DDP, FSDP, ZeRO), or set "
        "`use_dynamic_sampling=False`.",
        ("num_ranks_sharing_a_row",),
    ),
    Rule(
        lambda s: _carries(s) and s.has_images,
        "`dynamic_sampling_surplus='carry'` does not support models with images: a checkpoint cannot hold them. Set "
        "`dynamic_sampling_surplus='discard'`.",
        ("has_images",),
    ),
)


def why_refused(settings: Any, **facts: Any) -> str | None:
    """The message of the first rule that is broken: of the settings alone, or of those that these facts decide."""
    known = SimpleNamespace(**{**vars(settings), **facts})  # a config's fields, or those of a plan's recipe
    for rule in RULES:
        is_asked = facts.keys() >= {*rule.facts} if rule.facts else not facts
        if is_asked and (broken := rule.breaks(known)):
            if rule.message is None:
                return broken
            return rule.message.format_map(vars(known)) if isinstance(rule.message, str) else rule.message(known)
    return None


def check_rules(settings: Any, **facts: Any) -> None:
    """Refuses what [`why_refused`] refuses, as a `ValueError` with its message."""
    if (message := why_refused(settings, **facts)) is not None:
        raise ValueError(message)
