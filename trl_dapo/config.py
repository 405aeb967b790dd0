# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings of a DAPO run: those of [`~trl.GRPOConfig`], some with other defaults, and those that DAPO adds."""

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from .settings.arguments import read_mapping
from .settings.batch_sizes import (
    ComputedSize,
    count_microbatches,
    describe_batches,
    describe_split_group,
    size_batches,
)
from .settings.environment import num_processes_of
from .settings.help import help_from_docstring
from .settings.ranges import CHOICES, check_values, read_choice
from .settings.rules import check_rules
from .settings.sampling_defaults import SAVINGS, normalize
from .settings.warnings import hide_renaming_warnings


# Share of `ddp_timeout` that a request may take. A request that fails then raises an error that names the server
# before the other processes time out.
REQUEST_SHARE = 0.9
# Fields that take a mapping, or the path of a file that contains one.
MAPPING_OR_FILE = ("accelerator_config", "fsdp_config", "deepspeed")
# Batch sizes that are computed from others unless they are set.
BATCH_SIZES = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
# The default of `epsilon_high`. As an object of its own it differs from a 0.28 that the user sets: only the default
# is replaced if the user changes `epsilon` alone.
CLIP_HIGHER = float("0.28")


def _choices(name: str) -> dict[str, list]:
    """Return the metadata of a field that lists its choices on the command line."""
    return {"choices": [choice for choice in CHOICES[name] if choice is not None]}


@help_from_docstring
@dataclass
class DAPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`DAPOTrainer`].

    Every field of [`~trl.GRPOConfig`] keeps its meaning, except that `loss_type="dapo"` divides by the tokens of each
    optimizer step. Four get the defaults of the [DAPO paper](https://huggingface.co/papers/2503.14476):
    `epsilon=0.2`, `epsilon_high=0.28` (Clip-Higher), `beta=0.0` (no KL term) and `loss_type="dapo"` (token mean). With
    vLLM, log-probabilities are corrected token by token: `vllm_importance_sampling_mode="token_truncate"` and
    `vllm_importance_sampling_clip_max=2.0`.

    Parameters:
        > Batch sizes in prompts

        prompts_per_rollout (`int`, *optional*):
            Number of prompts in a rollout batch. The paper uses 512. `gradient_accumulation_steps` and
            `steps_per_generation` are computed from it for any number of processes, so a recipe trains on the same
            batches everywhere. Defaults to `prompts_per_step`, which gives one optimizer step per rollout.
        prompts_per_step (`int`, *optional*):
            Number of prompts in an optimizer step. The paper uses 32. It must divide `prompts_per_rollout`, which is
            also its default. If neither is set, TRL's batch sizes apply. The rows of a step are taken from the whole
            rollout at random, as in [`~trl.GRPOTrainer`].

        > Clip-Higher and the token mean

        epsilon (`float`, *optional*, defaults to `0.2`):
            Lower clip of a token's probability ratio: `1 - epsilon`.
        epsilon_high (`float`, *optional*, defaults to `0.28`):
            Upper clip of a token's probability ratio: `1 + epsilon_high`. It is larger than `epsilon`, so that
            unlikely tokens can become likely and the entropy does not collapse. If it is `None`, or if only `epsilon`
            is changed, `epsilon` is used.
        beta (`float`, *optional*, defaults to `0.0`):
            Weight of the KL term. DAPO has none.
        loss_type (`str`, *optional*, defaults to `"dapo"`):
            With `"dapo"` every token of an optimizer step has the same weight. The other values are those of
            [`~trl.GRPOConfig`].
        delta (`float`, *optional*):
            TRL's bound on the unclipped ratio (dual clip). If the advantage is negative, a token's loss stops growing
            when its ratio exceeds this bound. Use at least `1 + epsilon_high`. verl, SkyRL and NeMo RL call it
            `clip_ratio_c` (`ratio_clip_c`) and set it to 10.0. `None` turns it off, as in the paper.

        vllm_importance_sampling_mode (`str`, *optional*, defaults to `"token_truncate"`):
            How the ratio between the model's and vLLM's probabilities is bounded: `"token_truncate"`, `"token_mask"`,
            `"sequence_truncate"` or `"sequence_mask"`. [`~trl.GRPOConfig`] defaults to `"sequence_mask"`. Ratios of
            tokens are the default here because the ratio of a completion drifts from 1 as it gets longer: if vLLM's
            log-probabilities differ by 0.02 per token, the mean weight of a completion falls to 0.38 at 8k tokens and
            to 0.15 at 20k.
        vllm_importance_sampling_clip_max (`float`, *optional*, defaults to `2.0`):
            Upper bound of that ratio. The default of [`~trl.GRPOConfig`] is 3.0.

        > LoRA with vLLM

        vllm_lora_sync (`str`, *optional*):
            What is sent to vLLM when a model with LoRA is synchronized. `"adapter"` sends only the adapter. A server
            must then be started with `--enable-lora`, and must have access to `output_dir`. `"merge"` sends all
            weights, with the adapter merged into them, as in [`~trl.GRPOTrainer`]. Defaults to `"adapter"` if vLLM can
            serve the adapter, otherwise to `"merge"`.

        > Micro-batches

        max_tokens_per_microbatch (`int`, *optional*):
            Largest number of tokens of a micro-batch, padding included. A row that is longer is a micro-batch of its
            own. Each optimizer step is cut into as many micro-batches as are needed, the same number on every process.
            `per_device_train_batch_size` can stay 1, because `prompts_per_step` sets the size of a step. SkyRL uses
            the same name; verl calls it `ppo_max_token_len_per_gpu`, slime `max_tokens_per_gpu`, and NeMo RL
            `train_mb_tokens`. A budget bounds the memory. It is faster than the default if lengths differ much, and
            takes about as long otherwise. By default there is no bound, and a step is cut into
            `gradient_accumulation_steps` micro-batches of equal padded cost.

        > Dynamic sampling

        use_dynamic_sampling (`bool`, *optional*, defaults to `True`):
            Whether to drop groups whose rewards are all equal, and to sample other prompts until the batch is full.
            `False` leaves generation to [`~trl.GRPOTrainer`].
        dynamic_sampling_max_gen_batches (`float`, *optional*, defaults to `10.0`):
            Maximum number of completions that one rollout may sample, as a multiple of a full batch. Sampling
            continues until the batch is full or this limit is reached. `1.0` is the budget of [`~trl.GRPOTrainer`]: a
            rollout then never costs more than a rollout of GRPO, and its batch stays short if groups are dropped. `0`
            means no limit. Sampling also stops if less than a quarter of a batch is left of the limit, or too little
            for every process to sample the same number of whole groups.
        dynamic_sampling_on_exhausted (`str`, *optional*, defaults to `"top_up"`):
            What to do when that limit is reached and the batch is not full. `"top_up"` trains on the groups that were
            accepted, and fills the rest of the batch with rows that have no weight. `"error"` stops the run with an
            error that says why groups were dropped.
        dynamic_sampling_stop_after (`int`, *optional*, defaults to `25`):
            Stop the run after this many rollouts in a row without a group to train on, with a checkpoint and advice.
            `trl-dapo train` then exits with status 3. `0` never stops the run. If a rollout has no limit
            (`dynamic_sampling_max_gen_batches=0`), the run stops after 10 times this number of batches of completions
            (by default 250) without an accepted group, also within a rollout.
        max_tokens_generated (`int`, *optional*):
            End the run after this number of generated tokens, including those of dropped groups. The last rollout is
            still trained on.
        dynamic_sampling_rewards (`list[str]`, *optional*):
            Names of the reward functions that form the task reward. The task reward decides whether a group is
            accepted and which completions are correct. Defaults to all functions except length penalties: otherwise a
            group of incorrect completions that differ only in length would be accepted. If several functions decide
            and none is named here, groups are accepted by their weighted sum, and no completion counts as correct or
            incorrect. The screen and the memory are then off. To switch them on is an error, except for a screen with
            a number of completions, such as `dynamic_sampling_screen="4"`.
        dynamic_sampling_min_accuracy (`float`, *optional*, defaults to `0.0`):
            Accept a group only if more than this share of its completions is correct. With `0.0` the rewards only have
            to differ.
        dynamic_sampling_max_accuracy (`float`, *optional*, defaults to `1.0`):
            Accept a group only if less than this share of its completions is correct. With `1.0` the rewards only have
            to differ.
        dynamic_sampling_accuracy_threshold (`float`, *optional*, defaults to `0.0`):
            A completion is correct if its task reward exceeds this value.

        dynamic_sampling_mode (`str`, *optional*, defaults to `"filter"`):
            `"filter"` samples further prompts until the batch is full of accepted groups. `"paper"` does the same
            with `dynamic_sampling_surplus="discard"`, `dynamic_sampling_memory=False` and
            `dynamic_sampling_screen="off"`. `"replace"` stops when `min_replace_ratio` of the batch is accepted, and
            fills the rest with copies of accepted groups, as Polaris does: it samples less, and the batch has fewer
            different groups. `"mask"` samples once: dropped groups stay in the batch, but have no weight. It samples
            no more than `GRPOTrainer`, and the batch has fewer groups that count.
        dynamic_sampling_max_round_size (`int`, *optional*):
            Largest number of new prompts in a round. A round samples at most this number times `num_generations`
            completions, those that finish partial groups included. Without vLLM or continuous batching the default is
            the generation batch, because transformers runs a round as one batch. Otherwise there is no limit by
            default, and a limit also bounds the batches of an evaluation.
        batch_multiplier (`float`, *optional*):
            Number of new prompts in every round, as a multiple of `prompts_per_rollout`, as in the recipes of verl and
            NeMo RL, which set 3.0. Rounds are fewer then, and more is sampled than needed. By default the number of
            prompts in a round is the number of missing groups divided by the acceptance rate so far, and a few more to
            make another round unlikely.
        min_replace_ratio (`float`, *optional*, defaults to `0.3`):
            With `dynamic_sampling_mode="replace"`, the share of the batch that has to be accepted before copies fill
            the rest.
        dynamic_sampling_surplus (`str`, *optional*):
            What to do with accepted groups that the batch has no room for. `"carry"` trains on them in the next
            rollout, one rollout off-policy, with the log-probabilities of the policy that sampled them. `"discard"`
            drops them, so their completions are lost. Defaults to `"carry"` if the run supports it, which in
            simulations saves up to a tenth of the completions, or more if a rollout is one small round. If
            `dynamic_sampling_surplus`, `dynamic_sampling_screen` or `dynamic_sampling_memory` is off by default, a
            line at the start of the run says why.
        dynamic_sampling_screen (`str`, *optional*):
            Number of completions of a prompt to sample first, such as `"4"`. The rest of the group is sampled,
            together with the next prompts, only if the rewards of the first completions differ. Then the whole group
            is scored again, in one call, and only the rewards of this second scoring count. `"on"` chooses the
            cheapest number for each prompt, by its pass rate or by that of all prompts. `"auto"` does so only while
            few groups are accepted (below 20%), and samples whole groups otherwise. `"off"` always samples whole
            groups. If one group in ten is accepted, in simulations the screen takes about half the completions of
            whole groups for groups of 16, and two thirds for groups of 8. It takes more rounds, scores accepted groups
            twice, and prompts that are rarely solved train less often. With `dynamic_sampling_surplus="carry"`, groups
            that are still partial when a rollout ends are completed in the next one, or in the one after it. Defaults
            to `"auto"`, and to `"off"` if the rewards do not say which completions are correct, with tools, and on a
            GPU without vLLM or continuous batching. Not available with environments.
        dynamic_sampling_memory (`bool` or `str`, *optional*):
            Whether to remember each prompt's pass rate, and to skip prompts for some passes if their groups would
            probably be dropped. `"auto"` skips prompts only while few groups are accepted (below 20%). It saves
            nothing in the first pass over the dataset. After that it takes, in simulations, about a sixth of the
            completions if one group in ten is accepted, and prompts that are rarely solved train less often. `True`
            skips prompts at any acceptance rate. So does a folder, and the run then starts with the pass rates in it:
            the folder of an evaluation of the training prompts, of an earlier run, or of a checkpoint. Defaults to
            `"auto"` if the rewards say which completions are correct, and to `False` otherwise.

        > vLLM's server

        rollouts_ahead (`int`, *optional*, defaults to `0`):
            Number of rollouts that a vLLM server samples ahead. With `1`, the server samples the first round of the
            next rollout while this rollout is trained on. With `2` and a LoRA adapter, it samples two rollouts ahead,
            group by group, so no round waits for its longest completion. Rows train with the log-probabilities of the
            policy that sampled them. Needs `vllm_mode="server"` and `dynamic_sampling_surplus="carry"`. It saves
            seconds: with `1`, rollouts were 1.3x to 2.0x faster in a benchmark with a stand-in for the server. It
            costs staleness: with `2` and a high learning rate a model learned less. With `0` sampling and training
            take turns.
        vllm_request_timeout (`float`, *optional*):
            Seconds that a request to the server may take. Defaults to 90% of `ddp_timeout`, which is how long the
            other processes wait. (`vllm_server_timeout` bounds the time that the server may take to start.)

        > Overlong completions

        overlong_buffer_length (`int`, *optional*):
            Length in tokens of the interval below `max_completion_length` in which completions are punished, the
            paper's L_cache. The paper uses 4,096 of 20,480. The reward falls linearly, from 0 at
            `max_completion_length - overlong_buffer_length` to `-overlong_penalty_factor` at `max_completion_length`.
        overlong_penalty_factor (`float`, *optional*, defaults to `1.0`):
            Size of the punishment at `max_completion_length`.
        overlong_filtering (`bool`, *optional*):
            Whether to leave completions that `max_completion_length` cut off out of the loss. This is another name for
            TRL's `mask_truncated_completions`, in which the value is stored.

        > Reward scaling

        reward_scaling (`list[float]`, *optional*):
            Source minimum, source maximum, target minimum and target maximum, for example `[0.0, 1.0, -1.0, 1.0]`. The
            rewards of the task are clamped to the source range and mapped linearly to the target range. The accuracy
            threshold applies to the scaled reward, also in evaluation. Evaluation logs the unscaled rewards.

        > Evaluation during training

        eval_temperature (`float`, *optional*):
            Temperature in evaluation. Defaults to `temperature`.
        eval_top_p (`float`, *optional*):
            Top-p in evaluation. The paper uses 0.7. Defaults to `top_p`.
        eval_top_k (`int`, *optional*):
            Top-k in evaluation. Defaults to `top_k`.

        > Logging

        log_groups (`int`, *optional*, defaults to `4`):
            Number of groups per rollout, including dropped ones, whose prompt and completions are stored as text.
            `trl-dapo report` shows them. The folder `rollouts/` in the output folder, the ledger, has a row for every
            sampled group: its prompt, its rewards, and whether it was trained on or why it was dropped.

    Raises:
        ValueError: If a value is out of range or contradicts another. The message says what to change.

    Example:

    ```python
    >>> from trl_dapo import DAPOConfig

    >>> args = DAPOConfig(output_dir="out", max_completion_length=4096, overlong_buffer_length=1024, report_to="none")
    >>> args.epsilon_high
    0.28
    ```
    """

    prompts_per_rollout: int | None = None
    prompts_per_step: int | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = CLIP_HIGHER
    beta: float = 0.0
    loss_type: str = "dapo"
    vllm_importance_sampling_mode: str = "token_truncate"
    vllm_importance_sampling_clip_max: float | None = 2.0
    vllm_lora_sync: str | None = field(default=None, metadata=_choices("vllm_lora_sync"))
    max_tokens_per_microbatch: int | None = None
    use_dynamic_sampling: bool = True
    dynamic_sampling_max_gen_batches: float = 10.0
    dynamic_sampling_on_exhausted: str = field(default="top_up", metadata=_choices("dynamic_sampling_on_exhausted"))
    dynamic_sampling_stop_after: int = 25
    max_tokens_generated: int | None = None
    dynamic_sampling_rewards: list[str] | None = None
    dynamic_sampling_min_accuracy: float = 0.0
    dynamic_sampling_max_accuracy: float = 1.0
    dynamic_sampling_accuracy_threshold: float = 0.0
    dynamic_sampling_mode: str = field(default="filter", metadata=_choices("dynamic_sampling_mode"))
    dynamic_sampling_max_round_size: int | None = None
    batch_multiplier: float | None = None
    min_replace_ratio: float = 0.3
    dynamic_sampling_surplus: str | None = field(default=None, metadata=_choices("dynamic_sampling_surplus"))
    dynamic_sampling_screen: str | None = None
    dynamic_sampling_memory: str | None = None
    rollouts_ahead: int = field(default=0, metadata=_choices("rollouts_ahead"))
    vllm_request_timeout: float | None = None
    overlong_buffer_length: int | None = None
    overlong_penalty_factor: float = 1.0
    overlong_filtering: bool | None = None
    reward_scaling: list[float] | None = None
    eval_temperature: float | None = None
    eval_top_p: float | None = None
    eval_top_k: int | None = None
    log_groups: int = 4

    def __post_init__(self) -> None:
        self._reset_computed_sizes()
        stated = {name for name in BATCH_SIZES if getattr(self, name) != self._default_of(name)}
        self.scale_rewards = read_choice("scale_rewards", self.scale_rewards)
        check_values(self)
        self._check_mappings()
        for name in SAVINGS:
            setattr(self, name, normalize(name, getattr(self, name)))
        check_rules(self)
        if self.epsilon_high is CLIP_HIGHER and self.epsilon != 0.2:
            self.epsilon_high = None  # TRL takes `epsilon`
        # One field holds the setting, so that a config made from this one's fields can change it by either name.
        self.mask_truncated_completions = self.mask_truncated_completions or bool(self.overlong_filtering)
        self.overlong_filtering = None
        # `super()` counts the processes too, but only after it has read the batch sizes that depend on their number.
        num_processes = num_processes_of("WORLD_SIZE")
        if self._in_prompts:
            defaults = {name: field.default for name, field in self.__dataclass_fields__.items()}
            sizes = size_batches(self, defaults, num_processes)
            self.gradient_accumulation_steps = sizes["gradient_accumulation_steps"]
            self.steps_per_generation = sizes["steps_per_generation"]
        rows = self.per_device_train_batch_size * num_processes * (self.steps_per_generation or 0)
        if self._in_prompts:
            self.generation_batch_size = None  # `super()` refuses both sizes, and computes one from the other
        elif self.generation_batch_size == rows:  # both are set in a config that is made from another's `to_dict`
            self.generation_batch_size = None
            stated.discard("generation_batch_size")
        requested_batch_size = self.generation_batch_size
        hide_renaming_warnings()
        try:
            super().__post_init__()
        except ValueError as error:
            # TRL's own messages name sizes that the user did not set, or no value, and do not say what to change.
            if "must be divisible by num_generations" in str(error):
                steps = vars(self)["steps_per_generation"]  # an integer by now
                raise ValueError(describe_split_group(self, steps, self.world_size, requested_batch_size)) from None
            if "can not be both configured" in str(error) or "divisible by the global batch size" in str(error):
                count_microbatches(self, self.world_size)
            raise
        if self._in_prompts and self.world_size != num_processes:
            raise ValueError(
                f"The batch sizes were computed for {num_processes} processes (WORLD_SIZE), but this launch has "
                f"{self.world_size}. Without a GPU set `use_cpu=True`. Otherwise use `accelerate launch`, or unset "
                "WORLD_SIZE."
            )
        check_rules(self, groups_per_rollout=self.groups_per_rollout)
        for name in BATCH_SIZES:
            value = getattr(self, name)
            if name not in stated and value != self._default_of(name):
                setattr(self, name, ComputedSize(value))

    def _check_mappings(self) -> None:
        """Refuse text that transformers could not read as a mapping. The error names the field."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            is_mapping = name.endswith("_kwargs") or name == "transformers_continuous_batching_config"
            is_json = isinstance(value, str) and value.startswith("{")
            if is_mapping or (is_json and name in MAPPING_OR_FILE):
                read_mapping(name, value)

    def _reset_computed_sizes(self) -> None:
        """Reset the batch sizes that another config computed from fields that may have changed since."""
        for name in BATCH_SIZES:
            if isinstance(getattr(self, name), ComputedSize):
                setattr(self, name, self._default_of(name))

    def _default_of(self, name: str) -> Any:
        return self.__dataclass_fields__[name].default

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, as other packages expect them (`dict[str, Any]`)."""
        values = super().to_dict()
        return {name: int(value) if isinstance(value, ComputedSize) else value for name, value in values.items()}

    @property
    def _in_prompts(self) -> bool:
        return self.prompts_per_rollout is not None or self.prompts_per_step is not None

    @property
    def groups_per_rollout(self) -> int:
        """Number of groups in a rollout batch (`int`), computed from TRL's number of rows."""
        assert self.generation_batch_size is not None
        assert self.num_generations is not None
        return self.generation_batch_size // self.num_generations

    @property
    def batch_arithmetic(self) -> str:
        """One line that gives a rollout in prompts, rows, processes, micro-batches and optimizer steps."""
        return describe_batches(self, vars(self), self.world_size)

    @property
    def vllm_request_seconds(self) -> float:
        """Seconds that a request to the vLLM server may take."""
        return REQUEST_SHARE * self.ddp_timeout if self.vllm_request_timeout is None else self.vllm_request_timeout
