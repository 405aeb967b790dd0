# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""GPUs, read from an option or a header, and what `trl-dapo plan` prints."""

import json
import subprocess
import sys

import pytest
from plan_helpers import NINE_MACHINES, ONE_GPU, TINY_RUN

from trl_dapo.cli import main
from trl_dapo.plan.recipe import GPUS, parse_gpus, read_hardware


pytestmark = pytest.mark.fast


@pytest.fixture
def page_of(write, capsys):
    """Return a function that plans a recipe and returns its page as one line."""

    def show(hardware, fields, *options, status=0):
        assert main(["plan", "--config", write(hardware, fields), *options]) == status
        return " ".join(capsys.readouterr().out.split())

    return show


def test_what_does_not_fit_says_why_and_how_to_find_what_fits(page_of):
    page = page_of("one GPU of 40 GB", ONE_GPU, status=1)
    assert "Does not fit: sampling takes 40.7 GiB, more than the usable 38.0 GiB. Smaller " in page
    assert "Instead lower `vllm_gpu_memory_utilization`, take larger GPUs or shard" in page
    page_of("one GPU of 40 GB", ONE_GPU, "--vllm_gpu_memory_utilization", "0.4")
    # vLLM's share does not hold one completion.
    page = page_of("one GPU of 40 GB", ONE_GPU, "--vllm_gpu_memory_utilization", "0.15", status=1)
    assert "less than the 10,240 of one prompt and completion. Raise `vllm_gpu_memory_utilization`, or lower " in page
    assert "--trial` on the machine" not in page


def test_a_smaller_share_of_vllm_is_only_suggested_if_it_makes_room(page_of):
    # The weights, gradients and optimizer state of all weights take 25.6 GiB, whatever is left to vLLM.
    for share in ("0.3", "0.6"):
        page = page_of("one GPU of 24 GB", ONE_GPU, "--vllm_gpu_memory_utilization", share, status=1)
        assert "Smaller batches do not help. Instead take larger GPUs or shard" in page


def test_what_smaller_batches_would_mend_is_left_to_a_trial(page_of):
    page = page_of(
        "one GPU of 40 GB", ONE_GPU, "--use_vllm", "false", "--max_tokens_per_microbatch", "200000", status=1
    )
    assert "more than the usable 38.0 GiB. `trl-dapo train --trial` on the machine finds batch sizes that fit." in page


def test_a_vllm_that_shares_the_gpu_is_among_the_parts_of_an_update(page_of):
    asleep = ("--vllm_enable_sleep_mode", "true")
    assert "vLLM, asleep 1.0 GiB" in page_of("one GPU of 80 GB", ONE_GPU, *asleep)
    # A quarter of 81,559 MiB.
    awake = ("--vllm_enable_sleep_mode", "false", "--vllm_gpu_memory_utilization", "0.25")
    assert "vLLM, which does not sleep 19.9 GiB" in page_of("one GPU of 80 GB", ONE_GPU, *awake)


def test_tokens_are_counted_at_most(page_of):
    page = page_of("one GPU of 80 GB", ONE_GPU)
    # 1,024 completions of 8,192 tokens train; ten batches of them may be sampled, or as many as it takes.
    assert "longest row, prompt and completion 10,240 a micro-batch, or one such row 16,384 completions that a" in page
    assert "that a rollout trains on 8.4M completions that a rollout samples 83.9M Rollouts of the run 300" in page
    assert "samples no limit" in page_of("one GPU of 80 GB", ONE_GPU, "--dynamic_sampling_max_gen_batches", "0")
    assert "samples 8.4M" in page_of("one GPU of 80 GB", ONE_GPU, "--use_dynamic_sampling", "false")


PUNISHED_TWICE = "--overlong_buffer_length 8 --reward_funcs dapo_math"
IN_ROWS = "--prompts_per_rollout null --generation_batch_size"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpus 8xH1000", "names an unknown GPU. Known: H100-80GB, H200-141GB"),
        ("--gpus 8+8xH100-80GB", "the recipe does not use a vLLM server"),
        ("--vllm_mode server --use_vllm", "uses a vLLM server, and 1xCPU has no GPU for it"),
        ("--lengths 5", "Unknown option `--lengths`."),
        ("--num_processes 3", "Instead of `--num_processes` write, for example, `--gpus 4xH100-80GB`."),
        ("--learning_rat 1", "Unknown option `--learning_rat`. Did you mean `--learning_rate`?"),
        ("--max_steps 1e3", "`max_steps` must be a number, got '1e3'"),
        ("--load_in_4bit", "set `use_peft: true`"),
        ("--tiny_model false --model_name_or_path [", "The config of [ was not found"),
        ("--steps_per_generation 3", "`steps_per_generation=3` contradicts 4 prompts per rollout and 4 prompts per"),
        (
            f"{IN_ROWS} 20",
            "`generation_batch_size=20` cannot be divided into micro-batches of 1 process x `per_device",
        ),
        (f"{IN_ROWS} 16 --steps_per_generation 3", "`generation_batch_size=16` contradicts `steps_per_generation=3`"),
        ("--max_completion_length null", "With `max_completion_length=None` transformers samples 20 tokens"),
        ("--gpus H100-80GB --use_vllm --max_completion_length null", "A plan needs `max_completion_length`, got None"),
        (f"{PUNISHED_TWICE} get_soft_overlong_punishment", "punishes overlong completions, and so does the reward fu"),
        (f"{PUNISHED_TWICE} trl_dapo.rewards.soft_overlong_punishment", "and so does the reward function 'soft_overl"),
        ("--scale_rewards std", "`scale_rewards` must be one of 'group', 'batch', 'none', True, False, got 'std'"),
        ("--use_vllm --vllm_mode colocate --vllm_max_model_length 32", "must be a whole number of at least 33, got 3"),
        ("--accelerate_config nowhere.yaml", "`--accelerate_config nowhere.yaml` is not a file"),
        (
            "--use_peft --lora_modules_to_save norm",
            "`lora_modules_to_save` names norm, for which a plan cannot be made. Known",
        ),
        ("more", "`more` follows no `--field`"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_exit_status_2(write, capsys, options, message):
    assert main(["plan", "--config", write("any CPU", TINY_RUN), *options.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-dapo plan: ")
    assert message in line


def test_a_recipe_without_its_hardware_asks_for_it(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(TINY_RUN))
    assert main(["plan", "--config", str(path)]) == 2
    assert "Name them on the command line: `--gpus 8xH100-80GB`" in capsys.readouterr().err
    assert main(["plan", "--config", str(path), "--gpus", "2xL4-24GB"]) == 0
    assert "2xL4-24GB, DDP" in capsys.readouterr().out


def test_a_plan_for_a_cpu_speaks_of_no_gpu(capsys):
    assert main(["plan", "--config", "smoke_cpu"]) == 0
    page = capsys.readouterr().out
    assert "Memory of this machine, which has " in page
    assert not any(word in page for word in ("GPU", "CUDA", "vLLM"))


def test_a_plan_says_nothing_of_time(page_of):
    page = page_of("64 GPUs of 80 GB train with ZeRO-3, 8 more serve vLLM", NINE_MACHINES)
    assert not any(word in page for word in ("second", " min", " h ", "Time", "time", "bandwidth", "Would"))


def test_a_plan_imports_neither_torch_nor_transformers(write):
    """The reason why it takes no time."""
    path = write("one GPU of 80 GB", ONE_GPU)
    code = f"import sys, trl_dapo.cli as cli\nprint(cli.main(['plan', '--config', {path!r}]))"
    code += "\nprint({'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-2:] == ["0", "set()"], result.stderr


def test_gpus_are_read_from_words_and_from_a_header():
    cluster = parse_gpus("64+8xH100-80GB")
    assert (cluster.gpu, cluster.num_train, cluster.num_serve) == (GPUS["H100-80GB"], 64, 8)
    named = {"8xh200": "8xH200-141GB", "L4-24GB": "1xL4-24GB", "8xL4": "8xL4-24GB", "CPU": "1xCPU"}
    assert {text: str(parse_gpus(text)) for text in named} == named  # an L40S is another
    for text, message in (("8xH1000", "unknown GPU. Known: H100-80GB"), ("8 GPUs", "be read"), ("0xL4", "be read")):
        with pytest.raises(ValueError, match=message):
            parse_gpus(text)
    headers = {
        "one GPU of 24 GB, vLLM on the same GPU. Needs bitsandbytes.": "1xRTX4090-24GB",
        "8 GPUs of 80 GB, FSDP2, vLLM on the same GPUs.": "8xH100-80GB",
        "one GPU of 80 GB, all weights trained, vLLM on the same GPU.": "1xH100-80GB",
        "64 GPUs of 80 GB on 8 machines train with ZeRO-3, 8 more on a ninth serve vLLM.": "64+8xH100-80GB",
        "3 GPUs of 80 GB: two train, one serves vLLM.": "2+1xH100-80GB",
        "any CPU, about a minute on two cores. No download.": "1xCPU",
        **dict.fromkeys(("8 GPUs of 33 GB", "0 GPUs of 80 GB", ""), "None"),
    }
    assert {text: str(read_hardware(text)) for text in headers} == headers


def test_a_gpu_that_is_not_on_the_list_is_read_from_its_memory():
    cluster = parse_gpus("4+2x48GB:A6000")
    assert (cluster.num_train, cluster.num_serve, cluster.gpu.memory) == (4, 2, 48 * 2**30)
    assert parse_gpus(str(cluster)) == cluster
    assert parse_gpus("24gb:7900XTX").num_train == 1
    for text in ("0GB:A6000", "48GB:A 6", "48GB:A6000:0.77TB/s:155TFLOPs"):
        with pytest.raises(ValueError, match=r"cannot read the GPU .* For another GPU write .*2x48GB:A6000"):
            parse_gpus(text)
    with pytest.raises(ValueError, match=r"unknown GPU.*2x48GB:A6000"):
        parse_gpus("2xA6000")
