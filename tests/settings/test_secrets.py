# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from trl_dapo.settings.secrets import LEFT_OUT, without_secrets


pytestmark = pytest.mark.fast


def test_what_a_name_says_is_secret_is_left_out_at_any_depth():
    given = {"model_init_kwargs": {"token": "abc", "nested": [{"api_key": "x", "dtype": "float32"}]}, "password": 7}
    assert without_secrets(given) == {
        "model_init_kwargs": {"token": LEFT_OUT, "nested": [{"api_key": LEFT_OUT, "dtype": "float32"}]},
        "password": 7,
    }


@pytest.mark.parametrize(
    "value",
    [
        "hf_" + "a" * 20,
        "sk-proj-12345678",
        "ghp_abcdefgh1234",
        "AKIA1234567890AB",
        "aB3" * 12,
        "use hf_abcdefghij now",
    ],
)
def test_what_looks_like_a_token_is_left_out_wherever_it_stands(value):
    kept = without_secrets(value, "run_name")
    assert LEFT_OUT in kept
    assert value.split()[-2 if " " in value else 0] not in kept


def test_an_address_keeps_its_host_and_not_its_user():
    address = without_secrets("http://user:pa%40ss@gpu-7:8000/v1", "vllm_server_base_url")
    assert address == "http://gpu-7:8000/v1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token", "<|im_end|>"),
        ("revision", "0123456789abcdef0123456789abcdef01234567"),
        ("model_name_or_path", "meta-llama/Llama-3.2-1B-Instruct-Some-Very-Long-Name-V2"),
        ("output_dir", "out/Qwen3-1.7B-DAPO-math-17k-lr1e-6-Seed42"),
        ("vllm_structured_outputs_regex", r"[A-Z][a-z]+\d"),
        ("reward_funcs", ["my_package.rewards.Accuracy2WithFormat"]),
    ],
)
def test_what_is_no_secret_stays(name, value):
    assert without_secrets(value, name) == value
