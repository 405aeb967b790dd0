# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules and the removal of secrets, without torch and TRL. `test_config.py` tests that a config uses the rules."""

import re
from types import SimpleNamespace

import pytest

from trl_dapo.plan.recipe import declared_fields
from trl_dapo.settings.rules import RULES, check_rules, why_punished_twice, why_refused
from trl_dapo.settings.secrets import LEFT_OUT, without_secrets


pytestmark = pytest.mark.fast

DEFAULTS = declared_fields()  # the defaults of a config, without importing it
FACTS = {"groups_per_rollout": 8, "num_ranks_sharing_a_row": 1}
FACTS |= {"why_padding_matters": None, "has_images": False, "has_group_filter": False, "has_rollout_func": False}
FACTS |= {"has_environments": False, "has_tools": False, "is_quantized": False, "trains_float32": True}
FACTS |= {"why_no_correctness": None}
CARRY = {"dynamic_sampling_surplus": "carry"}
AHEAD = {"rollouts_ahead": 1, "use_vllm": True, "vllm_mode": "server", **CARRY}
FILTER = {"has_group_filter": True}


def settings(**changed):
    return SimpleNamespace(**{**DEFAULTS, **changed})


def test_the_defaults_break_no_rule():
    assert why_refused(settings()) is None
    assert why_refused(settings(), **FACTS) is None
    check_rules(settings(), **FACTS)


def test_settings_that_keep_the_policys_distribution_are_allowed_with_rollouts_ahead():
    plain = {
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": None,
        "generation_kwargs": {"stop": ["\n"], "top_p": 1.0},
    }
    assert why_refused(settings(**AHEAD, **plain)) is None


HARMLESS = {"do_sample": True, "num_beams": 1, "num_return_sequences": 1, "n": 1}
SERVER = {"use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_generation_kwarg_with_a_harmless_value_is_accepted_if_the_engine_knows_it(name):
    given = {"generation_kwargs": {name: HARMLESS[name]}}
    assert why_refused(settings(**given)) is None
    in_process = why_refused(settings(**given, use_vllm=True, vllm_mode="colocate"))
    assert in_process is None if name == "n" else f"`generation_kwargs['{name}']=" in in_process
    assert f"`generation_kwargs['{name}']=" in why_refused(
        settings(**given, **SERVER)
    )  # a request is for several completions
    by_another = why_refused(settings(generation_kwargs={name: 2}, use_transformers_continuous_batching=True))
    assert f"`generation_kwargs['{name}']=" in by_another


def test_beams_are_accepted_if_transformers_samples_them():
    assert why_refused(settings(generation_kwargs={"do_sample": True, "num_beams": 2})) is None


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_vllm_stops_at_texts_and_does_not_need_max_completion_length(mode):
    given = {"use_vllm": True, "vllm_mode": mode, "max_completion_length": None}
    assert why_refused(settings(**given, generation_kwargs={"stop": ["x"], "stop_token_ids": [5]})) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("stop", value) for value in (5, "", ["a", ""], ["a", 5], {"a": 1})),
        *(("stop_token_ids", value) for value in (5, ["5"], [-1], [True], "5")),
    ],
)
def test_stops_that_vllm_cannot_use_are_refused(name, value):
    given = settings(use_vllm=True, vllm_mode="colocate", generation_kwargs={name: value})
    assert f"`generation_kwargs['{name}']={value!r}` is not supported. Give " in why_refused(given)


@pytest.mark.parametrize("value", ["5", -1, [5, "5"], [5, -1], True])
def test_stops_that_transformers_cannot_use_are_refused(value):
    said = f"`generation_kwargs['eos_token_id']={value!r}` is not supported. Give a token id, or a list of them"
    assert said in why_refused(settings(generation_kwargs={"eos_token_id": value}))


def test_vllm_needs_detokenization_for_stop_texts():
    given = {"use_vllm": True, "vllm_mode": "colocate"}
    said = why_refused(settings(**given, generation_kwargs={"stop": "x", "detokenize": False}))
    assert "`generation_kwargs['detokenize']=False` contradicts `generation_kwargs['stop']`" in said
    assert why_refused(settings(**given, generation_kwargs={"stop_token_ids": [5], "detokenize": False})) is None


def test_empty_stops_are_accepted():
    assert why_refused(settings(generation_kwargs={"stop_strings": None, "stop": [], "stop_token_ids": None})) is None


@pytest.mark.parametrize(
    ("buffer", "names", "weights", "is_refused"),
    [
        (4, ["exact", "soft_overlong_punishment"], None, True),
        (4, ["soft_overlong_punishment_reward"], None, True),
        (4, ["exact", "soft_overlong_punishment"], [1.0, -0.5], True),
        (4, ["exact", "soft_overlong_punishment"], [1.0, 0.0], False),  # only logged
        (4, ["exact", "overlong"], None, False),
        (None, ["exact", "soft_overlong_punishment"], None, False),
    ],
)
def test_overlong_completions_are_not_punished_twice(buffer, names, weights, is_refused):
    said = why_punished_twice(buffer, names, weights)
    assert (said is not None) is is_refused
    if is_refused:
        assert said.startswith("`overlong_buffer_length=4` punishes overlong completions, and so does the reward ")
        assert repr(names[-1]) in said
        assert said.endswith("Leave out one of the two.")


OFF = {"use_dynamic_sampling": False}
CONTINUOUS = {"use_transformers_continuous_batching": True}
STOP_STRINGS = "`generation_kwargs['stop_strings']"
NOT_A_STOP = "is not supported. vLLM calls it `stop`"
MASK = {"dynamic_sampling_mode": "mask"}
SCREEN, BUDGET = {"dynamic_sampling_screen": "auto"}, {"max_tokens_per_microbatch": 64}
IN_MODE_MASK = "has no effect with `dynamic_sampling_mode='mask'`, which samples"
STEPS = "`optim='galore_adamw_layerwise'` changes the weights during every backward pass. Each micro-batch would be a"
SETTINGS = [
    ({**OFF, "max_tokens_generated": 1e9}, "`max_tokens_generated=1000000000.0` has no effect with `use_dynamic_samp"),
    ({**OFF, "log_groups": 0}, "`log_groups=0` has no effect with `use_dynamic_sampling=False`, which writes no led"),
    ({**MASK, "dynamic_sampling_on_exhausted": "error"}, f"`dynamic_sampling_on_exhausted='error'` {IN_MODE_MASK}"),
    ({**MASK, **CARRY}, f"`dynamic_sampling_surplus='carry'` {IN_MODE_MASK}"),
    ({**MASK, "dynamic_sampling_max_round_size": 2}, f"`dynamic_sampling_max_round_size=2` {IN_MODE_MASK}"),
    ({**MASK, "dynamic_sampling_max_gen_batches": 3}, f"`dynamic_sampling_max_gen_batches=3` {IN_MODE_MASK}"),
    ({**SCREEN, "num_generations": 2}, "`dynamic_sampling_screen='auto'` has no effect with `num_generations=2`: at"),
    (
        {"batch_multiplier": 3.0, "dynamic_sampling_max_gen_batches": 2.0},
        "With `batch_multiplier=3` each round samples that many batches, but `dynamic_sampling_max_gen_batches=2` a",
    ),
    ({"dynamic_sampling_mode": "paper", "dynamic_sampling_memory": True}, "`dynamic_sampling_memory=True` contradict"),
    ({**MASK, "batch_multiplier": 3.0}, f"`batch_multiplier=3.0` {IN_MODE_MASK}"),
    ({"min_replace_ratio": 0.5}, "`min_replace_ratio=0.5` has no effect with `dynamic_sampling_mode='filter'`. Set `"),
    ({**CARRY, "dynamic_sampling_mode": "replace"}, "`dynamic_sampling_surplus='carry'` contradicts `dynamic_sampli"),
    ({**CARRY, "loss_type": "grpo"}, "`dynamic_sampling_surplus='carry'` needs `loss_type='dapo'`, got 'grpo': TRL's"),
    ({"vllm_request_timeout": 60.0}, "`vllm_request_timeout=60.0` has no effect without a vLLM server. Leave it out,"),
    ({"rollouts_ahead": 1}, "`rollouts_ahead=1` needs a vLLM server on GPUs of its own, got generation with transf"),
    ({**AHEAD, "vllm_mode": "colocate"}, "`rollouts_ahead=1` needs a vLLM server on GPUs of its own, got `vllm_mode="),
    ({**AHEAD, **OFF}, "`rollouts_ahead=1` needs `use_dynamic_sampling=True`, got False: "),
    ({**AHEAD, "dynamic_sampling_surplus": "discard"}, "`rollouts_ahead=1` needs `dynamic_sampling_surplus='carry'`"),
    ({**AHEAD, "top_k": 20}, "`rollouts_ahead=1` contradicts `top_k=20`: completions that are sampled ahead are "),
    ({**AHEAD, "min_p": 0.1}, "`rollouts_ahead=1` contradicts `min_p=0.1`"),
    ({**AHEAD, "repetition_penalty": 1.05}, "`rollouts_ahead=1` contradicts `repetition_penalty=1.05`"),
    ({**AHEAD, "vllm_structured_outputs_regex": "a+"}, "`rollouts_ahead=1` contradicts `vllm_structured_outputs_re"),
    ({**AHEAD, "generation_kwargs": {"min_tokens": 8}}, "`rollouts_ahead=1` contradicts `generation_kwargs['min_to"),
    ({"generation_kwargs": {"seed": 1}}, "`generation_kwargs['seed']=1` is not supported. Leave it out: with it all "),
    ({"generation_kwargs": {"do_sample": False}}, "`generation_kwargs['do_sample']=False` is not supported. Leave it"),
    ({"generation_kwargs": {"n": 2}}, "`generation_kwargs['n']=2` is not supported. Set `num_generations`."),
    ({"generation_kwargs": {"logprobs": 3}}, "`generation_kwargs['logprobs']=3` is not supported. Leave it out: thos"),
    ({"generation_kwargs": {"temperature": 2}}, "`generation_kwargs['temperature']=2` is not supported. Set `tempera"),
    ({"overlong_buffer_length": 4, "max_completion_length": None}, "`overlong_buffer_length=4` needs a `max_completi"),
    ({"max_completion_length": None}, "With `max_completion_length=None` transformers samples 20 tokens, its own def"),
    ({**CONTINUOUS, "max_completion_length": None}, "`max_completion_length=None` means no limit with continuous ba"),
    (
        {"use_vllm": True, "loss_type": "dr_grpo", "max_completion_length": None},
        "`loss_type='dr_grpo'` divides by `max_completion_length`, which is `None`. Set a number",
    ),
    ({"generation_kwargs": {"stop_strings": ["x"]}}, f"{STOP_STRINGS}=['x']` {NOT_A_STOP}"),
    ({**CONTINUOUS, "generation_kwargs": {"stop_strings": "x"}}, f"{STOP_STRINGS}='x'` {NOT_A_STOP}"),
    ({**SERVER, "generation_kwargs": {"stop_strings": ["x"]}}, f"{STOP_STRINGS}=['x']` {NOT_A_STOP}"),
    (
        {**SERVER, "generation_kwargs": {"eos_token_id": [5]}},
        "`generation_kwargs['eos_token_id']=[5]` is not support",
    ),
    ({"generation_kwargs": {"stop": ["x"]}}, "`generation_kwargs['stop']=['x']` is not supported. vLLM knows it, bu"),
    ({"generation_kwargs": {"stop_token_ids": [5]}}, "`generation_kwargs['stop_token_ids']=[5]` is not supported. v"),
    ({**BUDGET, "loss_type": "grpo"}, "`max_tokens_per_microbatch=64` needs `loss_type='dapo'`"),
    ({**BUDGET, "top_entropy_quantile": 0.5}, "`max_tokens_per_microbatch=64` contradicts `top_entropy_quantile=0"),
    ({"optim": "galore_adamw_layerwise"}, STEPS),
    ({"optim": "adalomo"}, "`optim='adalomo'` changes the weights during every backward pass"),
    ({"vllm_lora_sync": "merge"}, "`vllm_lora_sync='merge'` has no effect without vLLM. Set `use_vllm=True`."),
    ({"reward_scaling": [0, 1]}, "`reward_scaling` must be four numbers (source minimum, source maximum, target mini"),
    ({"reward_scaling": [1, 1, 0, 1]}, "The source minimum of `reward_scaling` must be less than the source maximum,"),
]


@pytest.mark.parametrize(("changed", "said"), SETTINGS, ids=str)
def test_the_error_for_contradicting_settings_begins_with_the_value(changed, said):
    assert why_refused(settings(**changed)).startswith(said)
    with pytest.raises(ValueError, match=r"\.$"):
        check_rules(settings(**changed))


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({**MASK, **CARRY}, "Leave one of them out, or set `dynamic_sampling_surplus='discard'`."),
        ({**MASK, "dynamic_sampling_max_gen_batches": 3}, "or set `dynamic_sampling_max_gen_batches=10.0`."),
        ({**MASK, "batch_multiplier": 3.0}, "Leave one of them out."),
        (
            {**CARRY, "dynamic_sampling_mode": "replace"},
            "Set `dynamic_sampling_surplus='discard'`, or `dynamic_sampling_mode='filter'`.",
        ),
    ],
    ids=str,
)
def test_the_way_out_of_a_recipes_value_can_be_given_on_the_command_line(changed, advice):
    assert why_refused(settings(**changed)).endswith(advice)


ROUNDS_OF_4 = {"groups_per_rollout": 4}
IMAGES = {"has_images": True}
TWO_A_ROW = {"num_ranks_sharing_a_row": 2}
ROPE = {"why_padding_matters": "its rope type 'dynamic' depends on the number of columns"}
BAND = {"dynamic_sampling_max_accuracy": 0.9}
MEMORY, WITHOUT_CORRECTNESS = {"dynamic_sampling_memory": True}, {"why_no_correctness": "needs a name."}
IN_FP16 = {"use_transformers_continuous_batching": True, "fp16": True}


@pytest.mark.parametrize(
    ("changed", "facts", "message"),  # with `...` for the words between
    [
        ({"batch_multiplier": 0.1}, ROUNDS_OF_4, "`batch_multiplier=0.1` ... batch has 4. Raise it to at least 0.25."),
        ({"batch_multiplier": 2.0}, ROUNDS_OF_4, "`batch_multiplier=2.0` asks for rounds of 8 ... 4 prompts (the"),
        (BUDGET, IMAGES, "`max_tokens_per_microbatch=64` does not support models with images, ... Leave it out, and"),
        (
            {"use_vllm": True, "max_completion_length": None},
            {"has_tools": True},
            "`max_completion_length=None` is not supported with tools, ... Set a number",
        ),
        (BUDGET, TWO_A_ROW, "`max_tokens_per_microbatch=64` needs ... 2 processes share a row ... or leave it out."),
        (BUDGET, ROPE, "`max_tokens_per_microbatch=64` does not work ... its rope type 'dynamic' ... Leave it out,"),
        (CARRY, ROPE, "`dynamic_sampling_surplus='carry'` does not ... Set `dynamic_sampling_surplus='discard'`."),
        (OFF, FILTER, "A `group_filter` has no effect ... Leave it out, or set `use_dynamic_sampling=True`."),
        (MEMORY, FILTER, "`dynamic_sampling_memory=True` has no effect ... Leave one of them out."),
        (MEMORY, WITHOUT_CORRECTNESS, "`dynamic_sampling_memory=True` needs a name."),
        (SCREEN, WITHOUT_CORRECTNESS, "`dynamic_sampling_screen='auto'` needs a name."),
        ({"dynamic_sampling_screen": "on"}, WITHOUT_CORRECTNESS, "`dynamic_sampling_screen='on'` needs a name."),
        (BAND, FILTER, "`dynamic_sampling_max_accuracy=0.9` has no effect ... Leave one of them out."),
        (AHEAD, {"has_rollout_func": True}, "`rollouts_ahead=1` ... a `rollout_func`, ... Set `rollouts_ahead=0`."),
        (AHEAD, {"has_environments": True}, "`rollouts_ahead=1` ... environments, ... Set `rollouts_ahead=0`."),
        (AHEAD, {"has_tools": True}, "`rollouts_ahead=1` does not support tools, ... Set `rollouts_ahead=0`."),
        (AHEAD, {"is_quantized": True}, "`rollouts_ahead=1` does not support a base model in 4 or 8 bits"),
        (AHEAD, IMAGES, "`rollouts_ahead=1` does not support models with images, ... Set `rollouts_ahead=0`."),
        (IN_FP16, {"trains_float32": True}, "... with `fp16=True` ... to float16 ... Set `fp16=False`, or `use_v"),
        (
            {},
            TWO_A_ROW,
            "Dynamic sampling needs ... but 2 processes share a row ... or set `use_dynamic_sampling=False`.",
        ),
        (CARRY, IMAGES, "`dynamic_sampling_surplus='carry'` ... with images, ... Set `dynamic_sampling_surplus='disc"),
    ],
)
def test_the_error_for_settings_that_contradict_facts_contains_advice(changed, facts, message):
    said = why_refused(settings(**changed), **facts)
    assert re.match(re.escape(message).replace(re.escape("..."), ".*"), said)
    assert why_refused(settings(**changed), **{**FACTS, **facts}) == said
    assert why_refused(settings(**changed)) is None  # the facts are not known yet


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"use_dynamic_sampling": False, **CARRY}, {"has_images": True, "why_padding_matters": "so"}),
        ({"use_dynamic_sampling": False, **MEMORY}, {"num_ranks_sharing_a_row": 2, **WITHOUT_CORRECTNESS}),
        ({"dynamic_sampling_screen": "4"}, WITHOUT_CORRECTNESS),
        ({"loss_type": "grpo"}, {"why_padding_matters": "so"}),
        ({"loss_type": "grpo", "optim": "lomo"}, {}),
        ({"use_transformers_continuous_batching": True, "bf16": True}, {"trains_float32": False}),
        ({"batch_multiplier": 3.0, "use_vllm": True}, {"groups_per_rollout": 4}),
        ({"dynamic_sampling_memory": True}, {"has_group_filter": False}),
        ({"dynamic_sampling_max_round_size": 4}, {"groups_per_rollout": 4}),
    ],
    ids=str,
)
def test_rules_that_do_not_apply_are_not_broken(changed, facts):
    assert why_refused(settings(**changed), **facts) is None


def test_with_a_fact_only_the_rules_that_need_it_are_checked():
    broken = settings(max_tokens_generated=2, use_dynamic_sampling=False)
    assert why_refused(broken, has_images=True) is None
    assert why_refused(broken, trains_float32=True) is None
    assert why_refused(broken) is not None


def test_every_rule_needs_facts_that_are_named_here():
    assert {fact for rule in RULES for fact in rule.facts} == FACTS.keys()


def test_settings_with_the_name_of_a_secret_are_left_out_at_any_depth():
    given = {"model_init_kwargs": {"token": "abc", "nested": [{"api_key": "x", "dtype": "float32"}]}, "password": 7}
    assert without_secrets(given) == {
        "model_init_kwargs": {"token": LEFT_OUT, "nested": [{"api_key": LEFT_OUT, "dtype": "float32"}]},
        "password": LEFT_OUT,
    }


def test_values_below_the_name_of_a_secret_are_left_out_but_booleans_and_none_are_kept():
    assert without_secrets({"token": {"value": "a", "of": ["b"]}}) == {"token": {"value": LEFT_OUT, "of": [LEFT_OUT]}}
    assert without_secrets({"token": True, "hub_token": None}) == {"token": True, "hub_token": None}


@pytest.mark.parametrize(
    "name", ["X-Api-Key", "private-key", "aws_access_key_id", "auth", "Cookie", "db_pwd", "passphrase"]
)
def test_names_of_secrets_in_headers_and_clouds_are_known(name):
    assert without_secrets({name: "plain"}) == {name: LEFT_OUT}


TOKENS = ["hf_" + "a" * 20, "sk-proj-12345678", "ghp_abcdefgh1234", "AKIA1234567890AB", "aB3" * 12]
TOKENS += ["run_hf_abcdefghij", "use hf_abcdefghij now"]


@pytest.mark.parametrize("value", TOKENS)
def test_text_that_looks_like_a_token_is_left_out_anywhere(value):
    kept = without_secrets(value, "run_name")
    assert LEFT_OUT in kept
    assert value.split()[-2 if " " in value else 0] not in kept


def test_a_url_keeps_its_host_and_parameters_but_not_its_user_and_secrets():
    assert without_secrets("http://user:pa%40ss@gpu-7:8000/v1", "vllm_server_base_url") == "http://gpu-7:8000/v1"
    assert without_secrets("no `/data/http:/user:pass@gpu-7/x.json`") == "no `/data/http:/gpu-7/x.json`"
    assert without_secrets("see http://user:pa@ss@gpu-7/v1 now") == "see http://gpu-7/v1 now"
    kept = without_secrets("http://gpu-7/v1?api-key=plain&version=2&access_token=plain#end")
    assert kept == f"http://gpu-7/v1?api-key={LEFT_OUT}&version=2&access_token={LEFT_OUT}#end"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token", "<|im_end|>"),
        ("revision", "0123456789abcdef0123456789abcdef01234567"),
        ("model_name_or_path", "meta-llama/Llama-3.2-1B-Instruct-Some-Very-Long-Name-V2"),
        ("run_name", "Qwen3-1_7B-DAPO-math-LoRA-r16-seed42-2026-01-05"),
        ("run_name", "3F2504E0-4f89-11d3-9a0c-0305e82c3301"),
        ("dataset_name", "data/hf_dataset_big.jsonl"),
        ("output_dir", "out/Qwen3-1.7B-DAPO-math-17k-lr1e-6-Seed42"),
        ("vllm_structured_outputs_regex", r"[A-Z][a-z]+\d"),
        ("reward_funcs", ["my_package.rewards.Accuracy2WithFormat"]),
    ],
)
def test_values_that_are_not_secret_are_kept(name, value):
    assert without_secrets(value, name) == value
