# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""GPUs, read from an option or a header."""

import pytest

from trl_dapo.plan.recipe import GPUS, parse_gpus, read_hardware


pytestmark = pytest.mark.fast


def test_gpus_are_read_from_words_and_from_a_header():
    cluster = parse_gpus("64+8xH100-80GB")
    assert (cluster.gpu, cluster.num_train, cluster.num_serve) == (GPUS["H100-80GB"], 64, 8)
    named = {"8xh200": "8xH200-141GB", "L4-24GB": "1xL4-24GB", "8xL4": "8xL4-24GB", "CPU": "1xCPU"}
    assert {text: str(parse_gpus(text)) for text in named} == named  # an L40S is another
    for text, message in (("8xH1000", "no GPU that is known: H100-80GB"), ("8 GPUs", "be read"), ("0xL4", "be read")):
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


def test_a_gpu_that_is_not_on_the_list_is_read_from_its_sizes():
    cluster = parse_gpus("4+2x48GB:A6000:0.77TB/s:155TFLOPs")
    gpu = cluster.gpu
    assert (cluster.num_train, cluster.num_serve) == (4, 2)
    assert (gpu.memory, gpu.bandwidth, gpu.flops, gpu.link) == (48e9, 0.77e12, 155e12, 32e9)
    # A suggestion repeats it.
    assert parse_gpus(str(cluster)) == cluster
    assert parse_gpus("24gb:7900XTX:1tb/s:61.5tflops").num_train == 1
    for text in ("2x48GB:A6000", "0GB:A6000:1TB/s:1TFLOPs", "48GB:A6000:0TB/s:1TFLOPs", "48GB:A 6:1TB/s:1TFLOPs"):
        with pytest.raises(ValueError, match=r"cannot read the GPU .* Of another GPU write .*2x48GB:A6000:0.77TB/s"):
            parse_gpus(text)
    with pytest.raises(ValueError, match=r"no GPU that is known: .*2x48GB:A6000:0.77TB/s:155TFLOPs"):
        parse_gpus("2xA6000")
