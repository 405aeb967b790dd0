# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What DAPO changes in [`~trl.GRPOConfig`], what it adds, and what it refuses."""

from dataclasses import dataclass, field

from trl import GRPOConfig


ON_EXHAUSTED = ("top_up", "error")


@dataclass
class DAPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`DAPOTrainer`].

    Every field of [`~trl.GRPOConfig`] keeps its meaning. Four get the defaults of the
    [DAPO paper](https://huggingface.co/papers/2503.14476): `epsilon=0.2`, `epsilon_high=0.28` (Clip-Higher), `beta=0.0`
    (no KL term) and `loss_type="dapo"` (token mean).

    Parameters:
        > Clip-Higher and the token mean

        epsilon (`float`, *optional*, defaults to `0.2`):
            Lower clip: a token's probability ratio counts down to `1 - epsilon`.
        epsilon_high (`float`, *optional*, defaults to `0.28`):
            Upper clip: the ratio counts up to `1 + epsilon_high`. Larger than `epsilon`, so that unlikely tokens can
            become likely and the entropy does not collapse.
        clip_ratio_c (`float`, *optional*):
            Dual clip: where the advantage is negative, a token's loss grows no further once its ratio passes this.
            Above 1. verl, SkyRL and NeMo RL use 10.0 in their DAPO recipes; `None` turns it off, as in the paper.
            Not the same as TRL's `delta`, which clamps the ratio for either sign of the advantage.

        > Dynamic sampling

        use_dynamic_sampling (`bool`, *optional*, defaults to `True`):
            Whether to sample prompts until the rollout batch is full of groups that are neither all right nor all
            wrong. `False` leaves generation to [`~trl.GRPOTrainer`].
        dynamic_sampling_max_rounds (`int`, *optional*, defaults to `10`):
            Generation rounds for one rollout batch. `0` or less: no limit.
        dynamic_sampling_on_exhausted (`str`, *optional*, defaults to `"top_up"`):
            What to do when the rounds are used up and the batch is not full. `"top_up"` trains on the groups found and
            fills the batch with rows that weigh nothing. `"error"` stops, with the counts by reason.
        dynamic_sampling_rewards (`list[str]`, *optional*):
            Names of the reward functions that decide whether a group is accepted. Defaults to all but the length
            penalty: a group of wrong completions of different lengths teaches nothing but length.
        dynamic_sampling_min_accuracy (`float`, *optional*, defaults to `0.0`):
            Accept a group only if more than this share of its completions is right. `0.0` asks for nothing beyond a
            spread of rewards.
        dynamic_sampling_max_accuracy (`float`, *optional*, defaults to `1.0`):
            Accept a group only if less than this share of its completions is right. `1.0` asks for nothing beyond a
            spread of rewards.
        dynamic_sampling_accuracy_threshold (`float`, *optional*, defaults to `0.0`):
            A completion is right if its deciding reward exceeds this.

        > Overlong completions

        overlong_buffer_length (`int`, *optional*):
            The paper's L_cache, in tokens. Set it and completions longer than `max_completion_length -
            overlong_buffer_length` are punished in proportion, down to `-overlong_penalty_factor`. The paper: 4,096 of
            20,480.
        overlong_penalty_factor (`float`, *optional*, defaults to `1.0`):
            Size of the punishment at `max_completion_length`.
        overlong_filtering (`bool`, *optional*):
            Whether completions cut off by `max_completion_length` are left out of the loss. TRL calls this
            `mask_truncated_completions`; either name sets both, and they must agree.

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

    epsilon: float = field(default=0.2, metadata={"help": "Lower clip: the ratio counts down to `1 - epsilon`."})
    epsilon_high: float | None = field(
        default=0.28, metadata={"help": "Upper clip (Clip-Higher): the ratio counts up to `1 + epsilon_high`."}
    )
    beta: float = field(default=0.0, metadata={"help": "KL coefficient. DAPO has no KL term."})
    loss_type: str = field(
        default="dapo",
        metadata={
            "help": "`dapo`: every token of an optimizer step weighs the same. Any other value is left to GRPOTrainer."
        },
    )
    clip_ratio_c: float | None = field(
        default=None,
        metadata={
            "help": "Dual clip: for negative advantages a token's loss grows no further past this ratio (above 1). "
            "verl, SkyRL and NeMo RL use 10.0. None turns it off."
        },
    )
    use_dynamic_sampling: bool = field(
        default=True,
        metadata={"help": "Sample prompts until the rollout batch is full of groups with right and wrong completions."},
    )
    dynamic_sampling_max_rounds: int = field(
        default=10, metadata={"help": "Generation rounds for one rollout batch. 0 or less: no limit."}
    )
    dynamic_sampling_on_exhausted: str = field(
        default="top_up",
        metadata={
            "help": "When the rounds are used up: `top_up` trains on the accepted groups and fills the batch with rows "
            "that weigh nothing; `error` stops with the counts by reason.",
            "choices": list(ON_EXHAUSTED),
        },
    )
    dynamic_sampling_rewards: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the reward functions that decide. Default: all but the length penalty."},
    )
    dynamic_sampling_min_accuracy: float = field(
        default=0.0, metadata={"help": "Accept a group only if more than this share of it is right."}
    )
    dynamic_sampling_max_accuracy: float = field(
        default=1.0, metadata={"help": "Accept a group only if less than this share of it is right."}
    )
    dynamic_sampling_accuracy_threshold: float = field(
        default=0.0, metadata={"help": "A completion is right if its deciding reward exceeds this."}
    )
    overlong_buffer_length: int | None = field(
        default=None,
        metadata={"help": "The paper's L_cache in tokens. Setting it turns the soft overlong punishment on."},
    )
    overlong_penalty_factor: float = field(
        default=1.0, metadata={"help": "Size of the soft overlong punishment at `max_completion_length`."}
    )
    overlong_filtering: bool | None = field(
        default=None,
        metadata={"help": "Leave cut-off completions out of the loss. TRL's `mask_truncated_completions`."},
    )

    def __post_init__(self):
        if self.num_generations is not None and self.num_generations < 2:
            raise ValueError(
                f"`num_generations` must be at least 2, got {self.num_generations}: a group of one completion has no "
                "spread of rewards to learn from."
            )
        self._check_clip()
        self._check_dynamic_sampling()
        self._check_overlong()
        super().__post_init__()

    def _check_clip(self):
        if self.clip_ratio_c is None:
            return
        if self.clip_ratio_c <= 1:
            raise ValueError(f"`clip_ratio_c` must be above 1, got {self.clip_ratio_c}. Use `None` to turn it off.")
        if self.loss_type != "dapo":
            raise ValueError(
                f"`clip_ratio_c={self.clip_ratio_c}` needs `loss_type='dapo'`, got {self.loss_type!r}: TRL's other "
                "losses have no dual clip. Set `clip_ratio_c=None`."
            )

    def _check_dynamic_sampling(self):
        if self.dynamic_sampling_on_exhausted not in ON_EXHAUSTED:
            raise ValueError(
                f"`dynamic_sampling_on_exhausted` must be one of {', '.join(map(repr, ON_EXHAUSTED))}, got "
                f"{self.dynamic_sampling_on_exhausted!r}."
            )
        low, high = self.dynamic_sampling_min_accuracy, self.dynamic_sampling_max_accuracy
        if not 0 <= low < high <= 1:
            raise ValueError(
                "`dynamic_sampling_min_accuracy` and `dynamic_sampling_max_accuracy` must satisfy "
                f"0 <= min < max <= 1, got {low} and {high}."
            )
        G = self.num_generations
        if G is not None and not any(
            (low == 0 or right / G > low) and (high == 1 or right / G < high) for right in range(1, G)
        ):
            raise ValueError(
                f"No group of {G} completions has an accuracy strictly between `dynamic_sampling_min_accuracy={low}` "
                f"and `dynamic_sampling_max_accuracy={high}`: every group would be dropped. Widen the band or raise "
                "`num_generations`."
            )
        if self.dynamic_sampling_rewards is not None and not self.dynamic_sampling_rewards:
            raise ValueError(
                "`dynamic_sampling_rewards` is empty: no reward function would decide. Name at least one, or leave it "
                "`None` for all but the length penalty."
            )

    def _check_overlong(self):
        buffer = self.overlong_buffer_length
        if buffer is not None:
            if self.max_completion_length is None:
                raise ValueError(
                    f"`overlong_buffer_length={buffer}` needs a `max_completion_length`: the punishment is measured "
                    "from it."
                )
            if not 0 < buffer <= self.max_completion_length:
                raise ValueError(
                    f"`overlong_buffer_length` must be between 1 and `max_completion_length` "
                    f"({self.max_completion_length}), got {buffer}."
                )
        if self.overlong_penalty_factor < 0:
            raise ValueError(
                f"`overlong_penalty_factor` must not be negative, got {self.overlong_penalty_factor}: it would reward "
                "overlong completions."
            )
        if self.overlong_penalty_factor != 1.0 and buffer is None:
            raise ValueError(
                f"`overlong_penalty_factor={self.overlong_penalty_factor}` has no effect without "
                "`overlong_buffer_length`. Set the buffer (the paper: a fifth of `max_completion_length`)."
            )
        if self.overlong_filtering is None:
            self.overlong_filtering = self.mask_truncated_completions
        elif self.overlong_filtering != self.mask_truncated_completions:
            # TRL's default is False, so True here can only be the user's.
            if self.mask_truncated_completions:
                raise ValueError(
                    "`overlong_filtering=False` contradicts `mask_truncated_completions=True`: they are two names of "
                    "one setting. Set only one of them."
                )
            self.mask_truncated_completions = True
