# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What DAPO changes in [`~trl.GRPOConfig`], what it adds, and what it refuses."""

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from .settings.arguments import read_mapping
from .settings.batch_sizes import WorkedOut, count_microbatches, describe_batches, describe_torn_group, size_batches
from .settings.environment import num_processes_of
from .settings.help import help_from_docstring
from .settings.ranges import CHOICES, check_values, read_choice
from .settings.rules import check_rules
from .settings.sampling_defaults import SAVINGS, normalize
from .settings.warnings import leave_out_renaming_warnings


# Of `ddp_timeout`: the error that names the server comes before the other processes have given up.
REQUEST_SHARE = 0.9
# Fields that are a mapping, or the path of a file with one.
MAPPING_OR_FILE = ("accelerator_config", "fsdp_config", "deepspeed")
# The sizes that follow from others where they are not stated.
BATCH_SIZES = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
CLIP_HIGHER = float("0.28")  # an object that nobody has who writes 0.28: left alone, it follows `epsilon`


def _choices(name: str) -> dict[str, list]:
    """What the command line offers."""
    return {"choices": [choice for choice in CHOICES[name] if choice is not None]}


@help_from_docstring
@dataclass
class DAPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`DAPOTrainer`].

    Every field of [`~trl.GRPOConfig`] keeps its meaning. Four get the defaults of the
    [DAPO paper](https://huggingface.co/papers/2503.14476): `epsilon=0.2`, `epsilon_high=0.28` (Clip-Higher),
    `beta=0.0` (no KL term) and `loss_type="dapo"` (token mean). With vLLM, log-probabilities are corrected token by
    token: `vllm_importance_sampling_mode="token_truncate"` and `vllm_importance_sampling_clip_max=2.0`.

    Parameters:
        > Batch sizes in prompts

        prompts_per_rollout (`int`, *optional*):
            Prompts of a rollout batch; the paper: 512. `gradient_accumulation_steps` and `steps_per_generation` follow
            from it, for any number of processes: a recipe trains on the same batches everywhere. Defaults to
            `prompts_per_step`: one optimizer step a rollout.
        prompts_per_step (`int`, *optional*):
            Prompts of an optimizer step; the paper: 32. It must divide `prompts_per_rollout`, its default. A step
            takes its rows from the whole rollout at random, as in [`~trl.GRPOTrainer`].

        > Clip-Higher and the token mean

        epsilon (`float`, *optional*, defaults to `0.2`):
            Lower clip of a token's probability ratio: `1 - epsilon`.
        epsilon_high (`float`, *optional*, defaults to `0.28`):
            Upper clip: `1 + epsilon_high`. It is larger than `epsilon`, so that unlikely tokens can become likely and
            the entropy does not collapse. Where it is `None`, or only `epsilon` is changed, it is `epsilon`.
        beta (`float`, *optional*, defaults to `0.0`):
            Weight of the KL term. DAPO has none.
        loss_type (`str`, *optional*, defaults to `"dapo"`):
            `"dapo"`: every token of an optimizer step weighs the same. Other values are TRL's.
        delta (`float`, *optional*):
            TRL's bound on the unclipped ratio, the dual clip. Where the advantage is negative, a token's loss does not
            grow once its ratio passes this. Use at least `1 + epsilon_high`. verl, SkyRL and NeMo RL call it
            `clip_ratio_c` (`ratio_clip_c`) and set 10.0. `None` turns it off, as in the paper.

        vllm_importance_sampling_mode (`str`, *optional*, defaults to `"token_truncate"`):
            How the ratio between the model's and vLLM's probabilities is bounded: `"token_truncate"`, `"token_mask"`,
            `"sequence_truncate"` or `"sequence_mask"`, the default of [`~trl.GRPOConfig`]. The ratio of a token stays
            near 1. The ratio of a completion does not: where vLLM's log-probabilities differ by 0.02 a token, the
            mean weight of a completion falls to 0.38 at 8k tokens and to 0.15 at 20k.
        vllm_importance_sampling_clip_max (`float`, *optional*, defaults to `2.0`):
            Upper bound of that ratio; 3.0 in [`~trl.GRPOConfig`].

        > LoRA with vLLM

        vllm_lora_sync (`str`, *optional*):
            What vLLM gets at every sync of a model with LoRA. `"adapter"`: the adapter alone. A server must be started
            with `--enable-lora`, and must see `output_dir`. `"merge"`: all weights, with the adapter merged into
            them, as in [`~trl.GRPOTrainer`]. Defaults to `"adapter"` where vLLM can serve it, else `"merge"`.

        > Micro-batches

        max_tokens_per_microbatch (`int`, *optional*):
            Tokens that a micro-batch may have, padding included. A longer row goes alone. Each optimizer step is cut
            into as many micro-batches as that takes, the same number on every rank. `per_device_train_batch_size` may
            stay 1 beside it: `prompts_per_step` sizes the step. SkyRL calls it by the same name, verl
            `ppo_max_token_len_per_gpu`, slime `max_tokens_per_gpu`, NeMo RL `train_mb_tokens`. Defaults to
            `gradient_accumulation_steps` micro-batches of equal padded cost, without a bound.

        > Dynamic sampling

        use_dynamic_sampling (`bool`, *optional*, defaults to `True`):
            Whether to drop groups whose rewards are all equal, and to sample other prompts until the batch is full.
            `False` leaves generation to [`~trl.GRPOTrainer`].
        dynamic_sampling_max_gen_batches (`float`, *optional*, defaults to `10.0`):
            The most completions that one rollout may sample, in rollout batches. Sampling continues until the batch is
            full or this limit is reached. `1.0` is the budget of [`~trl.GRPOTrainer`]: a rollout then never costs more
            than GRPO's, and its batch stays short if groups are dropped. `0` is no limit. If less is left than a
            quarter of a batch, or than an equal share of whole groups for every process, no further prompts are
            sampled.
        dynamic_sampling_on_exhausted (`str`, *optional*, defaults to `"top_up"`):
            What to do when that limit is reached and the batch is not full. `"top_up"` trains on the groups that were
            accepted; the rest of the batch is filled with rows that weigh nothing. `"error"` stops the run and says
            why groups were dropped.
        dynamic_sampling_stop_after (`int`, *optional*, defaults to `20`):
            Stop the run after this many rollouts in a row that accepted no group, with a checkpoint and advice.
            `trl-dapo train` then exits with status 3. `0` never stops. Without a limit
            (`dynamic_sampling_max_gen_batches=0`) a rollout ends, and the run with it, after 10 times as many batches
            of completions in a row without an accepted group.
        max_tokens_generated (`int`, *optional*):
            The run ends after so many generated tokens, dropped groups included, and trains on the last rollout first.
        dynamic_sampling_rewards (`list[str]`, *optional*):
            Names of the reward functions that make the task reward. It decides whether a group is accepted and which
            completions are right. Defaults to all but length penalties: a group of wrong completions of different
            lengths teaches nothing but length. With several functions groups are accepted by their weighted sum, and
            nothing says which completions are right.
        dynamic_sampling_min_accuracy (`float`, *optional*, defaults to `0.0`):
            Accept a group only if more than this share of it is right. At `0.0` rewards only have to differ.
        dynamic_sampling_max_accuracy (`float`, *optional*, defaults to `1.0`):
            Accept a group only if less than this share of it is right. At `1.0` rewards only have to differ.
        dynamic_sampling_accuracy_threshold (`float`, *optional*, defaults to `0.0`):
            A completion is right if its task reward exceeds this.

        dynamic_sampling_mode (`str`, *optional*, defaults to `"filter"`):
            `"filter"` samples further prompts until the batch is full of accepted groups. `"paper"` does the same
            without the three savings below: surplus groups are discarded, no prompt is skipped, and every group is
            sampled whole. `"replace"` stops when `min_replace_ratio` of the batch is accepted, and fills the rest with
            copies of accepted groups (Polaris). `"mask"` samples once: dropped groups stay in the batch and weigh
            nothing.
        dynamic_sampling_max_round_size (`int`, *optional*):
            Prompts that one round may draw, and `num_generations` times as many completions, those that complete a
            group among them. Defaults to no limit with vLLM or continuous batching, where it also bounds the calls of
            an evaluation, else to the generation batch: transformers runs a round as one batch.
        batch_multiplier (`float`, *optional*):
            Size of every round, in rollout batches, as in verl's and NeMo RL's recipes (3.0 there). By default a round
            asks for the missing groups divided by the acceptance rate so far, and for more where a round costs much.
        min_replace_ratio (`float`, *optional*, defaults to `0.3`):
            With `dynamic_sampling_mode="replace"`: share of the batch to accept before copies fill the rest.
        dynamic_sampling_surplus (`str`, *optional*):
            What to do with accepted groups beyond the batch. `"carry"` trains on them in the next rollout, one rollout
            off-policy, with the log-probabilities of the policy that sampled them. `"discard"` does not. Defaults to
            `"carry"` where the run supports it; of what is off, as with the next two, a line at the start says why.
        dynamic_sampling_screen (`str`, *optional*):
            How many completions of a prompt to sample first, such as `"4"`. The rest of its group is sampled only if
            their rewards differ, together with the next prompts. A group that is whole is scored again, in one call,
            and those rewards count. `"on"` takes the cheapest number for each prompt, by its pass rate or that of all
            prompts. `"auto"` does so only while few groups are accepted. `"off"` samples whole groups at once.
            Carrying completes started groups in the next rollout. Defaults to `"on"` if the rewards say which
            completions are right, except with tools, or with transformers on a GPU.
        dynamic_sampling_memory (`bool` or `str`, *optional*):
            Whether to remember each prompt's pass rate, and to skip prompts for a while that are likely to be dropped.
            `"auto"` skips only while few groups are accepted. The folder of an evaluation of the training prompts, of
            an earlier run or of a checkpoint is remembered from the start. Defaults to `True` where the rewards say
            which completions are right.

        > vLLM's server

        rollouts_ahead (`int`, *optional*, defaults to `0`):
            With `1`, the server samples the next rollout's first round while this rollout trains. With `2` and a LoRA
            adapter, it samples two rollouts group by group, and waits for no longest. Rows train with the
            log-probabilities of the policy that sampled them. Needs `vllm_mode="server"` and
            `dynamic_sampling_surplus="carry"`. `0` takes turns.
        vllm_request_timeout (`float`, *optional*):
            Seconds that a request to the server may take. Defaults to nine tenths of `ddp_timeout`, for which the
            other processes wait. (`vllm_server_timeout` bounds its start.)

        > Overlong completions

        overlong_buffer_length (`int`, *optional*):
            The paper's L_cache, in tokens: 4,096 of 20,480 there. Completions longer than `max_completion_length -
            overlong_buffer_length` are punished in proportion, down to `-overlong_penalty_factor`.
        overlong_penalty_factor (`float`, *optional*, defaults to `1.0`):
            Size of the punishment at `max_completion_length`.
        overlong_filtering (`bool`, *optional*):
            Whether completions cut off by `max_completion_length` are left out of the loss. It is another name for
            TRL's `mask_truncated_completions`, which holds the value.

        > Reward scaling

        reward_scaling (`list[float]`, *optional*):
            Source minimum, source maximum, target minimum, target maximum, for instance `[0.0, 1.0, -1.0, 1.0]`. The
            task's rewards are clamped to the source range and mapped linearly to the target range. The accuracy
            threshold applies to the scaled reward, also in evaluation, which logs the rewards unscaled.

        > Evaluation during training

        eval_temperature (`float`, *optional*):
            Temperature of evaluation. Defaults to `temperature`.
        eval_top_p (`float`, *optional*):
            Nucleus of evaluation; the paper: 0.7. Defaults to `top_p`.
        eval_top_k (`int`, *optional*):
            Number of tokens that evaluation samples from. Defaults to `top_k`.

        > Logging

        log_groups (`int`, *optional*, defaults to `4`):
            The ledger, `rollouts/` in the output folder, has a row for every group. Of so many a rollout, dropped ones
            too, it keeps prompt and completions as text; `trl-dapo report` shows them. See [`~trl_dapo.run.ledger`].

    Raises:
        ValueError: If a value is out of range or contradicts another; the message says what to change.

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
    dynamic_sampling_stop_after: int = 20
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
        self._forget_worked_out_sizes()
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
        # `super()` counts the processes too, but after it has read the batch sizes that hang on them.
        num_processes = num_processes_of("WORLD_SIZE")
        if self._in_prompts:
            defaults = {name: field.default for name, field in self.__dataclass_fields__.items()}
            sizes = size_batches(self, defaults, num_processes)
            self.gradient_accumulation_steps = sizes["gradient_accumulation_steps"]
            self.steps_per_generation = sizes["steps_per_generation"]
        rows = self.per_device_train_batch_size * num_processes * (self.steps_per_generation or 0)
        if self._in_prompts:
            self.generation_batch_size = None  # `super()` refuses both, and works it out from the other
        elif self.generation_batch_size == rows:  # a config that is made from another one's `to_dict` states both
            self.generation_batch_size = None
            stated.discard("generation_batch_size")
        asked = self.generation_batch_size
        leave_out_renaming_warnings()
        try:
            super().__post_init__()
        except ValueError as error:
            # TRL names sizes that it worked out itself, or no value, and no way out.
            if "must be divisible by num_generations" in str(error):
                steps = vars(self)["steps_per_generation"]  # an integer by now
                raise ValueError(describe_torn_group(self, steps, self.world_size, asked)) from None
            if "can not be both configured" in str(error) or "divisible by the global batch size" in str(error):
                count_microbatches(self, self.world_size)
            raise
        if self._in_prompts and self.world_size != num_processes:
            raise ValueError(
                f"The batch sizes were worked out for {num_processes} processes (WORLD_SIZE), but this launch has "
                f"{self.world_size}. Without a GPU set `use_cpu`; else use `accelerate launch`, or unset it."
            )
        check_rules(self, groups_per_rollout=self.groups_per_rollout)
        for name in BATCH_SIZES:
            value = getattr(self, name)
            if name not in stated and value != self._default_of(name):
                setattr(self, name, WorkedOut(value))

    def _check_mappings(self) -> None:
        """Refuse text that transformers could not read as a mapping, with the name of its field."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            is_mapping = name.endswith("_kwargs") or name == "transformers_continuous_batching_config"
            is_json = isinstance(value, str) and value.startswith("{")
            if is_mapping or (is_json and name in MAPPING_OR_FILE):
                read_mapping(name, value)

    def _forget_worked_out_sizes(self) -> None:
        """Leave out the batch sizes that another config worked out from fields that this one may have changed."""
        for name in BATCH_SIZES:
            if isinstance(getattr(self, name), WorkedOut):
                setattr(self, name, self._default_of(name))

    def _default_of(self, name: str) -> Any:
        return self.__dataclass_fields__[name].default

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, as other packages expect them (`dict[str, Any]`)."""
        values = super().to_dict()
        return {name: int(value) if isinstance(value, WorkedOut) else value for name, value in values.items()}

    @property
    def _in_prompts(self) -> bool:
        return self.prompts_per_rollout is not None or self.prompts_per_step is not None

    @property
    def groups_per_rollout(self) -> int:
        """Groups of a rollout batch (`int`), of which TRL works out the rows."""
        assert self.generation_batch_size is not None
        assert self.num_generations is not None
        return self.generation_batch_size // self.num_generations

    @property
    def batch_arithmetic(self) -> str:
        """One line: a rollout in prompts, rows, processes, micro-batches and optimizer steps."""
        return describe_batches(self, vars(self), self.world_size)

    @property
    def vllm_request_seconds(self) -> float:
        """Seconds that a request to vLLM's server may take."""
        return REQUEST_SHARE * self.ddp_timeout if self.vllm_request_timeout is None else self.vllm_request_timeout
