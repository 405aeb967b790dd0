# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from trl_dapo.settings.secrets import LEFT_OUT, without_secrets


pytestmark = pytest.mark.fast


def test_what_a_name_says_is_secret_is_left_out_at_any_depth():
    given = {"model_init_kwargs": {"token": "abc", "nested": [{"api_key": "x", "dtype": "float32"}]}, "password": 7}
    assert without_secrets(given) == {
        "model_init_kwargs": {"token": LEFT_OUT, "nested": [{"api_key": LEFT_OUT, "dtype": "float32"}]},
        "password": LEFT_OUT,
    }


def test_what_lies_under_the_name_of_a_secret_is_one_and_that_there_is_one_may_be_said():
    assert without_secrets({"token": {"value": "a", "of": ["b"]}}) == {"token": {"value": LEFT_OUT, "of": [LEFT_OUT]}}
    assert without_secrets({"token": True, "hub_token": None}) == {"token": True, "hub_token": None}


@pytest.mark.parametrize(
    "name", ["X-Api-Key", "private-key", "aws_access_key_id", "auth", "Cookie", "db_pwd", "passphrase"]
)
def test_names_that_headers_and_clouds_give_to_secrets_are_known(name):
    assert without_secrets({name: "plain"}) == {name: LEFT_OUT}


TOKENS = ["hf_" + "a" * 20, "sk-proj-12345678", "ghp_abcdefgh1234", "AKIA1234567890AB", "aB3" * 12]
TOKENS += ["run_hf_abcdefghij", "use hf_abcdefghij now"]


@pytest.mark.parametrize("value", TOKENS)
def test_what_looks_like_a_token_is_left_out_wherever_it_stands(value):
    kept = without_secrets(value, "run_name")
    assert LEFT_OUT in kept
    assert value.split()[-2 if " " in value else 0] not in kept


def test_an_address_keeps_its_host_and_parameters_and_not_its_user_and_its_secrets():
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
def test_what_is_no_secret_stays(name, value):
    assert without_secrets(value, name) == value
