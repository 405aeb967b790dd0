# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import pickle

import pytest
from helpers import prompts, right, tiny_config
from trl import GRPOConfig

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.settings.rules import KNOWN_LOSSES
from trl_dapo.update.loss import LOSS_MEANS


def test_the_defaults_are_the_papers(tmp_path):
    args = tiny_config(tmp_path)
    assert (args.epsilon, args.epsilon_high, args.beta, args.loss_type) == (0.2, 0.28, 0.0, "dapo")
    assert (args.scale_rewards, args.use_dynamic_sampling, args.overlong_buffer_length) == ("group", True, None)
    assert (args.dynamic_sampling_max_gen_batches, args.dynamic_sampling_on_exhausted) == (10, "top_up")
    # vLLM's log-probabilities are corrected token by token, up to a ratio of 2.
    assert (args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max) == ("token_truncate", 2.0)


@pytest.mark.parametrize(
    ("settings", "epsilon_high"),
    [
        ({"epsilon": 3e-4}, 3e-4),  # as in TRL
        ({"epsilon": 0.3, "epsilon_high": 0.28}, 0.28),
        ({"epsilon_high": 0.25}, 0.25),
        ({"epsilon_high": None}, 0.2),
        ({"epsilon": 0.2}, 0.28),
    ],
    ids=str,
)
def test_epsilon_alone_is_both_clips_as_in_trl(tiny_model, tmp_path, settings, epsilon_high):
    trainer = DAPOTrainer(tiny_model, right, tiny_config(tmp_path, **settings), train_dataset=prompts(8))
    assert trainer.epsilon_high == epsilon_high


def test_other_fields_keep_the_defaults_of_trl():
    ours = {field.name: field.default for field in dataclasses.fields(DAPOConfig)}
    changed = {"epsilon_high", "beta", "loss_type", "epsilon"}
    changed |= {"vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"}
    for field in dataclasses.fields(GRPOConfig):
        if field.name not in changed:
            assert ours[field.name] == field.default, field.name


DPPO = {"loss_type": "dppo"}
IN_VLLM = {"use_vllm": True, "max_completion_length": 32}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"overlong_buffer_length": 9}, r"between 1 and `max_completion_length` \(8\), got 9"),
        ({"overlong_penalty_factor": -0.5, "overlong_buffer_length": 4}, "at least 0 and finite, got -0.5. A"),
        ({"overlong_penalty_factor": 2.0}, "`overlong_penalty_factor=2.0` has no effect without"),
        ({"num_generations": 1}, "at least 2, got 1"),
        ({"num_generations": 4.0}, "`num_generations` must be a whole number of at least 2, got 4.0"),
        ({"max_tokens_generated": "5"}, "above 0 and finite, got '5'"),
        ({"max_tokens_generated": float("inf")}, "above 0 and finite, got inf. Leave it out for no limit."),
        ({"max_tokens_generated": 0}, "`max_tokens_generated` must be above 0 and finite, got 0"),
        ({"log_groups": True}, "a whole number of at least 0, got True"),
        ({"temperature": 0}, "`temperature` must be above 0 and finite, got 0"),
        ({"dynamic_sampling_stop_after": -1}, "must be a whole number of at least 0, got -1. 0 means never."),
        ({"top_entropy_quantile": 1.5}, "at least 0 and at most 1, got 1.5"),
        ({"epsilon": -0.1}, "`epsilon` must be at least 0 and finite, got -0.1"),
        ({"dynamic_sampling_min_accuracy": "a"}, "a finite number, got 'a'"),
        ({"scale_rewards": "std"}, "one of 'group', 'batch', 'none', True, False, got 'std'"),
        ({"num_generations": None}, "at least 2, got None"),
        ({"top_p": 10**400}, "`top_p` must be above 0 and at most 1, got 1000"),  # no float holds it
        # A completion of 32 tokens and a prompt of one.
        (
            {**IN_VLLM, "vllm_max_model_length": 32},
            r"at least 33, got 32\. .* `max_completion_length` \(32\) tokens and its prompt have to fit",
        ),
        ({"dynamic_sampling_min_accuracy": 0.5, "dynamic_sampling_max_accuracy": 0.5}, "got 0.5 and 0.5"),
        ({"dynamic_sampling_min_accuracy": -0.1}, "got -0.1 and 1.0"),
        ({"dynamic_sampling_max_accuracy": 1.5}, "got 0.0 and 1.5"),
        # 1, 2 or 3 of 4 completions are correct. None of 0.25, 0.5 and 0.75 is between 0.3 and 0.45.
        ({"dynamic_sampling_min_accuracy": 0.3, "dynamic_sampling_max_accuracy": 0.45}, "No group of 4 completions"),
        ({"dynamic_sampling_rewards": []}, "is empty"),
        ({"dynamic_sampling_rewards": "accuracy"}, r"a list of names, got the text 'accuracy'. Write `\['accuracy'\]"),
        ({"dynamic_sampling_accuracy_threshold": float("nan")}, "must be a finite number, got nan"),
        (DPPO, "`loss_type='dppo'` is not one of 'grpo', .* 'dapo': rows that only fill .* could change"),
        ({"loss_type": "dapoo"}, "`loss_type='dapoo'` is unknown. Did you mean 'dapo'"),
        ({"loss_type": "DrGRPO", "use_dynamic_sampling": False}, "`loss_type='DrGRPO'` is unknown. Did you mean 'dr_"),
        ({"dynamic_sampling_mode": "filtr"}, "got 'filtr'. Did you mean 'filter'?"),
        (
            {"dynamic_sampling_mode": "none"},
            "`dynamic_sampling_mode` must be one of 'filter', 'paper', 'replace', 'mask', got 'none'. To turn dynamic "
            "sampling off, set `use_dynamic_sampling=False`.",
        ),
        ({**DPPO, "dynamic_sampling_max_gen_batches": 1, "dynamic_sampling_stop_after": 0}, "is not one of"),
        ({"eval_top_k": 1.5}, "a whole number of at least 0, got 1.5. 0 means all tokens."),
        ({"rollouts_ahead": 3}, "`rollouts_ahead` must be one of 0, 1, 2, got 3"),
        ({"max_completion_length": None}, "With `max_completion_length=None` transformers samples 20 tokens.* Set a"),
        ({"generation_kwargs": {"stop_strings": ["x"]}}, r"`generation_kwargs\['stop_strings'\]=\['x'\]` is not"),
        ({"overlong_filtering": False, "mask_truncated_completions": True}, "contradicts"),
    ],
)
def test_the_error_for_a_value_that_is_not_allowed_contains_the_value(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"dynamic_sampling_max_gen_batches": 0},  # no limit
        {"dynamic_sampling_max_gen_batches": 1},  # a screen would need two rounds
        {**IN_VLLM, "vllm_max_model_length": 33},
        {**IN_VLLM, "max_completion_length": None, "vllm_max_model_length": 33},
        {**IN_VLLM, "vllm_mode": "server", "vllm_max_model_length": 32},  # a server has its own window
        {"dynamic_sampling_min_accuracy": 0.25, "dynamic_sampling_max_accuracy": 0.75},  # 2 of 4 is between them
        {"top_entropy_quantile": 0.0},  # only the highest entropy
        {"max_tokens_generated": 1e9},
        {"top_p": None, "repetition_penalty": None, "num_generations_eval": 0},  # as TRL takes them
        {"epsilon": 0.0},
        {"scale_rewards": False},
        # A loss that only a later TRL knows, with settings for which no row only fills the batch.
        {**DPPO, "dynamic_sampling_on_exhausted": "error"},
        {**DPPO, "dynamic_sampling_max_gen_batches": 0, "dynamic_sampling_stop_after": 0},
        {**DPPO, "use_dynamic_sampling": False},
    ],
    ids=str,
)
def test_an_allowed_value_is_accepted(tmp_path, overrides):
    assert tiny_config(tmp_path, **overrides).loss_type == overrides.get("loss_type", "dapo")


def test_the_rules_know_the_losses_of_the_objective():
    assert tuple(LOSS_MEANS) == KNOWN_LOSSES


@pytest.mark.parametrize("name", ["overlong_filtering", "mask_truncated_completions"])
def test_overlong_filtering_and_mask_truncated_completions_are_the_same_setting(tmp_path, name):
    assert tiny_config(tmp_path, **{name: True}).mask_truncated_completions is True
    assert tiny_config(tmp_path, overlong_filtering=False).mask_truncated_completions is False
    on = dataclasses.replace(tiny_config(tmp_path), **{name: True})
    assert on.mask_truncated_completions is True
    assert dataclasses.replace(on, mask_truncated_completions=False).mask_truncated_completions is False


# 16 completions per prompt, micro-batches of 8 rows per process.
PAPER = {"num_generations": 16, "per_device_train_batch_size": 8}


@pytest.fixture
def sized(tmp_path, launched_on):
    """A config as `num_processes` processes would make it."""

    def make(num_processes, **overrides):
        launched_on(num_processes)
        return DAPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **{**PAPER, **overrides})

    return make


@pytest.mark.parametrize(
    ("num_processes", "accumulation", "microbatches"),
    # A step of 32 prompts is 32 x 16 = 512 rows, a rollout of 512 prompts 8,192.
    # 64 processes: 64 x 8 = 512 rows, so 1 micro-batch per step and 16 per rollout. 8 processes: 8 x 8 = 64 rows, so
    # 512 / 64 = 8 and 128. 1 process: 8 rows, so 64 and 1,024.
    [(64, 1, 16), (8, 8, 128), (1, 64, 1024)],
)
def test_sizes_in_prompts_give_the_papers_batches_on_any_number_of_processes(
    sized, num_processes, accumulation, microbatches
):
    args = sized(num_processes, prompts_per_rollout=512, prompts_per_step=32)
    assert (args.gradient_accumulation_steps, args.steps_per_generation) == (accumulation, microbatches)
    assert args.generation_batch_size == 8192
    assert args.batch_arithmetic == (
        f"Rollout: 512 prompts x 16 completions = 8192 rows = {num_processes} process{'es' * (num_processes > 1)} x "
        f"8 rows x {microbatches} micro-batches; 16 optimizer steps of 32 prompts"
    )


@pytest.mark.parametrize("name", ["prompts_per_rollout", "prompts_per_step"])
def test_with_only_one_size_in_prompts_a_rollout_has_one_optimizer_step(sized, name):
    args = sized(4, **{name: 32})
    # 32 x 16 = 512 rows in micro-batches of 4 x 8 = 32.
    assert (args.gradient_accumulation_steps, args.steps_per_generation) == (16, 16)
    assert args.batch_arithmetic.endswith("16 micro-batches; 1 optimizer step of 32 prompts")


def test_the_batch_arithmetic_also_describes_sizes_in_micro_batches(sized):
    args = sized(2, gradient_accumulation_steps=4, steps_per_generation=8, num_iterations=3)
    # 2 x 8 x 8 = 128 rows; 8 / 4 = 2 steps of 2 x 8 x 4 = 64 rows, three times.
    assert args.batch_arithmetic.endswith("= 2 processes x 8 rows x 8 micro-batches; 6 optimizer steps of 4 prompts")


@pytest.mark.parametrize(
    ("num_processes", "overrides", "message"),
    [
        (1, {"prompts_per_step": 0}, "`prompts_per_step` must be a whole number of at least 1, got 0"),
        (
            1,
            {"prompts_per_rollout": 500, "prompts_per_step": 32},
            "nearest values of `prompts_per_rollout` that are: 480 or 512",
        ),
        # 32 x 16 = 512 rows. 24 x 8 = 192 rows, which are 12 whole prompts. 512 / 24 is not a whole number either.
        (
            24,
            {"prompts_per_step": 32},
            r"512 rows .* of 24 processes .* = 192 rows.*_per_step` that fits: 24 or 36\.$",
        ),
        # 8 x 16 = 128 rows. 32 x 8 = 256 rows = 16 prompts. With 128 / 32 = 4 rows per process it fits.
        (32, {"prompts_per_rollout": 8}, "that fits: 16. Or set `per_device_train_batch_size=4`."),
        # 64 micro-batches of 8 rows each on one process.
        (1, {"prompts_per_step": 32, "gradient_accumulation_steps": 8}, "=8` contradicts .* they give `grad.*=64`"),
        (1, {"prompts_per_step": 32, "steps_per_generation": 1}, "=1` contradicts .* they give `steps.*=64`"),
        (1, {"prompts_per_step": 32, "generation_batch_size": 256}, "=256` contradicts .* they give `gener.*=512`"),
    ],
)
def test_the_error_for_sizes_in_prompts_that_do_not_fit_contains_the_arithmetic(
    sized, num_processes, overrides, message
):
    with pytest.raises(ValueError, match=message):
        sized(num_processes, **overrides)


ROWS = "per_device_train_batch_size"


@pytest.mark.parametrize(
    ("num_processes", "overrides", "message"),
    [
        # The divisors of 16 rows nearest to 7 are 4 and 8. 14 and 21 rows are 2 and 3 groups of 7.
        (1, {"num_generations": 7, ROWS: 16}, rf"^A rollout of 1 process x `{ROWS}=16` x 1 micro-batch = 16 rows"),
        (1, {"num_generations": 7, ROWS: 16}, rf"=7` .*: 4 or 8\. Nearest `{ROWS}` that fits: 14 or 21\.$"),
        # 2 x 5 x 3 = 30 rows. With 8 rows per process there are 48 rows, which are 3 groups of 16.
        (2, {ROWS: 5, "gradient_accumulation_steps": 3}, r"x 3 micro-batches = 30 rows .*: 15 or 30\. Near.*: 8\.$"),
        (1, {ROWS: 1}, rf"= 1 row .*Nearest `{ROWS}` that fits: 16\.$"),
        # Whole groups of 6 and micro-batches of 8 rows fit into 24 rows.
        (1, {"num_generations": 6, "generation_batch_size": 40}, "5 or 8. Nearest `gen.*_size` that fits: 24 or 48"),
    ],
)
def test_the_error_for_a_rollout_with_incomplete_groups_names_the_nearest_sizes(
    sized, num_processes, overrides, message
):
    with pytest.raises(ValueError, match=message):
        sized(num_processes, **overrides)


def test_a_config_from_the_fields_of_another_keeps_its_sizes_in_prompts(sized):
    args = sized(8, prompts_per_rollout=512, prompts_per_step=32)
    for again in (DAPOConfig(**args.to_dict()), dataclasses.replace(args, learning_rate=1e-5)):
        assert (again.prompts_per_rollout, again.prompts_per_step) == (512, 32)
        assert (again.gradient_accumulation_steps, again.steps_per_generation) == (8, 128)


def test_a_world_size_of_another_launch_is_refused(tmp_path, monkeypatch, launched_on):
    launched_on(1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"for 4 processes \(WORLD_SIZE\), but this launch has 1\. Without a GPU"):
        tiny_config(tmp_path, prompts_per_step=8, gradient_accumulation_steps=1)
    tiny_config(tmp_path)  # without sizes in prompts it does not matter


@pytest.mark.parametrize("world_size", ["", "0", " ", "many"])
def test_a_world_size_that_is_not_a_number_of_processes_means_one_process(
    tmp_path, monkeypatch, launched_on, world_size
):
    launched_on(1)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    # 8 prompts x 4 completions are 32 rows: 8 micro-batches of 4 rows on one process.
    args = tiny_config(tmp_path, prompts_per_step=8, gradient_accumulation_steps=1)
    assert args.gradient_accumulation_steps == 8


# ---- A config made from another one, with a field changed ----

SIZES = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")


@pytest.mark.parametrize(
    ("stated", "changed", "sizes"),
    # One process, and 16 completions per prompt. Sizes that were not set are computed again.
    [
        # No size was set: one micro-batch per step and per rollout.
        ({}, {"per_device_train_batch_size": 16}, (1, 1, 16)),
        # A rollout has the micro-batches of one optimizer step: 4 of 32 rows are 128 rows.
        ({"gradient_accumulation_steps": 4}, {"per_device_train_batch_size": 32}, (4, 4, 128)),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 8}, (8, 8, 128)),
        # 2 micro-batches were set and do not change: 2 of 32 rows are 64 rows.
        ({"steps_per_generation": 2}, {"per_device_train_batch_size": 32}, (1, 2, 64)),
        ({"steps_per_generation": 2}, {"steps_per_generation": 3}, (1, 3, 48)),
        ({"gradient_accumulation_steps": 4}, {"steps_per_generation": 2}, (4, 2, 32)),
        # 64 rows were set and do not change: 64 / 32 are 2 micro-batches.
        ({"generation_batch_size": 64}, {"per_device_train_batch_size": 32}, (1, 2, 64)),
        ({"generation_batch_size": 64}, {"generation_batch_size": 32}, (1, 2, 32)),
        ({"gradient_accumulation_steps": 4}, {"generation_batch_size": 32}, (4, 2, 32)),
        # The number that was computed, 4 x 16 = 64, is now set: 64 / 32 are 2 micro-batches.
        (
            {"gradient_accumulation_steps": 4},
            {"per_device_train_batch_size": 32, "generation_batch_size": 64},
            (4, 2, 64),
        ),
        # Both were set and agree: the micro-batches do not change.
        ({"steps_per_generation": 2, "generation_batch_size": 32}, {"per_device_train_batch_size": 32}, (1, 2, 64)),
        # 8 prompts x 16 are 128 rows: 4 micro-batches of 32.
        ({"prompts_per_step": 8}, {"per_device_train_batch_size": 32}, (4, 4, 128)),
        # 4 prompts x 16 are 64 rows: 4 micro-batches of 16.
        ({"prompts_per_step": 8}, {"prompts_per_step": 4}, (4, 4, 64)),
        # 16 prompts x 16 are 256 rows, in two optimizer steps of 8 micro-batches.
        ({"prompts_per_step": 8}, {"prompts_per_rollout": 16}, (8, 16, 256)),
        # 8 prompts x 8 are 64 rows: 4 micro-batches of 16.
        ({"prompts_per_step": 8}, {"num_generations": 8}, (4, 4, 64)),
        ({"prompts_per_step": 8}, {"prompts_per_step": None}, (1, 1, 16)),
        ({"prompts_per_step": 8}, {"prompts_per_step": None, "gradient_accumulation_steps": 2}, (2, 2, 32)),
        ({}, {"prompts_per_step": 8}, (8, 8, 128)),
        ({"gradient_accumulation_steps": 4}, {"num_generations": 8}, (4, 4, 64)),
    ],
    ids=str,
)
def test_computed_sizes_are_computed_again_if_a_field_changes(sized, stated, changed, sizes):
    args = sized(1, **{"per_device_train_batch_size": 16, **stated})
    for one in (args, copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args, seed=1)):
        again = dataclasses.replace(one, **changed)
        assert tuple(getattr(again, name) for name in SIZES) == sizes
    assert {type(value) for name, value in args.to_dict().items() if name in SIZES} == {int}


@pytest.mark.parametrize(
    ("stated", "changed", "message"),
    [
        # 1 x 8 x 4 are 32 rows.
        (
            {"steps_per_generation": 4},
            {"generation_batch_size": 64},
            "^`generation_batch_size=64` contradicts `steps_per_generation=4`, which gives 32 rows with 1 process "
            "x `per_device_train_batch_size=8`. Leave one of them out.$",
        ),
        # 64 rows are not a multiple of 24. The nearest multiples are 48 and 72.
        (
            {"generation_batch_size": 64},
            {"per_device_train_batch_size": 24},
            "^`generation_batch_size=64` cannot be divided into micro-batches of 1 process x "
            "`per_device_train_batch_size=24` = 24 rows. Nearest `generation_batch_size` that can: 48 or 72.$",
        ),
        # 8 prompts x 16 are 128 rows: 16 micro-batches of 8, and 8 of 16.
        (
            {"prompts_per_step": 8, "gradient_accumulation_steps": 16},
            {"per_device_train_batch_size": 16},
            "^`gradient_accumulation_steps=16` contradicts .* they give `grad.*=8`. Leave out `grad",
        ),
        (
            {"prompts_per_step": 8},
            {"steps_per_generation": 4},
            "^`steps_per_generation=4` contradicts .* they give `steps_per_generation=16`",
        ),
        # 4 prompts x 16 are 64 rows.
        (
            {"prompts_per_step": 8, "generation_batch_size": 128},
            {"prompts_per_step": 4},
            "^`generation_batch_size=128` .* they give `gener.*=64`",
        ),
    ],
)
def test_a_size_that_was_set_and_contradicts_a_change_is_refused(sized, stated, changed, message):
    args = sized(1, **stated)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(args, **changed)


# ---- Settings as text on a command line ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", "group"),
        ("true", "group"),
        ("yes", "group"),
        ("False", "none"),
        ("false", "none"),
        ("no", "none"),
        ("none", "none"),
        ("group", "group"),
        ("batch", "batch"),
    ],
)
def test_scale_rewards_can_be_given_as_text(tmp_path, text, value):
    assert tiny_config(tmp_path, scale_rewards=text).scale_rewards == value


CONFIG = "transformers_continuous_batching_config"
MAPPINGS = [name for name in DAPOConfig.__dataclass_fields__ if name.endswith("_kwargs") or name == CONFIG]
OR_FILES = ["accelerator_config", "fsdp_config", "deepspeed"]


def test_every_field_that_transformers_reads_as_json_is_listed_here():
    assert {*MAPPINGS, *OR_FILES} == {*DAPOConfig._VALID_DICT_FIELDS}


@pytest.mark.parametrize("name", [*MAPPINGS, *OR_FILES])
def test_the_error_for_invalid_json_names_the_field(tmp_path, name):
    with pytest.raises(ValueError, match=rf"^`{name}` must be a mapping, got '{{a: 1}}', which is not JSON \(Expec"):
        tiny_config(tmp_path, **{name: "{a: 1}"})


@pytest.mark.parametrize("name", MAPPINGS)
def test_the_error_for_text_instead_of_a_mapping_names_the_field(tmp_path, name):
    with pytest.raises(ValueError, match=rf"^`{name}` must be a mapping, got 'bfloat16', which is not JSON \(Expec"):
        tiny_config(tmp_path, **{name: "bfloat16"})


def test_a_mapping_in_json_is_read_and_checked_by_the_rules(tmp_path):
    assert tiny_config(tmp_path, model_init_kwargs='{"dtype": "float32"}').model_init_kwargs == {"dtype": "float32"}
    with pytest.raises(ValueError, match=r"^`generation_kwargs\['seed'\]=1` is not supported"):
        tiny_config(tmp_path, generation_kwargs='{"seed": 1}')
