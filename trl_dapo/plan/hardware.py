# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The GPUs that a plan knows, and how many of them a run has."""

import math
import os
import re
from dataclasses import dataclass


GPUS_PER_MACHINE = 8
PCIE = 32e9  # bytes/s in one direction: PCIe 4.0 x16
OWN = "Of another GPU write memory, name, bandwidth and bfloat16 operations: 2x48GB:A6000:0.77TB/s:155TFLOPs."
NETWORK = 50e9  # bytes/s of a GPU's own port between machines: 400 Gbit/s, as in NVIDIA's DGX H100


@dataclass(frozen=True)
class GPU:
    """What a plan needs of an accelerator, from NVIDIA's data sheets."""

    name: str  # as in `--gpus`
    memory: float  # bytes, the total that `nvidia-smi` shows
    flops: float  # of dense bfloat16 with accumulation in float32; a sheet's headline counts sparsity, twice that
    bandwidth: float  # bytes/s
    link: float  # bytes/s to another GPU in one direction: half of what NVLink states, else PCIe 4.0 x16


GPUS = {
    name: GPU(name, mebibytes * 2**20, teraflops * 1e12, gigabytes * 1e9, link * 1e9)
    for name, mebibytes, teraflops, gigabytes, link in (
        ("H100-80GB", 81_559, 989, 3_350, 450),
        ("H200-141GB", 143_771, 989, 4_800, 450),
        ("B200-180GB", 183_359, 2_250, 8_000, 900),
        ("A100-80GB", 81_920, 312, 2_039, 300),
        ("A100-40GB", 40_960, 312, 1_555, 300),
        ("L40S-48GB", 46_068, 362, 864, 32),
        ("L4-24GB", 23_034, 121, 300, 32),
        ("RTX4090-24GB", 24_564, 165, 1_008, 32),
        ("RTX3090-24GB", 24_576, 71, 936, 32),
    )
}
# What "GPUs of 80 GB" in a recipe's header is taken for.
GPU_OF_SIZE = {
    24: "RTX4090-24GB",
    40: "A100-40GB",
    48: "L40S-48GB",
    80: "H100-80GB",
    141: "H200-141GB",
    180: "B200-180GB",
}


def cpu() -> GPU:
    """This machine without a GPU; a core multiplies as fast in float32 as one of a server did."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return GPU("CPU", memory, flops=80e9 * (os.cpu_count() or 1), bandwidth=20e9, link=10e9)


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run."""

    gpu: GPU
    num_train: int  # a process each
    num_serve: int = 0  # that vLLM's server has for itself

    def __str__(self) -> str:
        return f"{self.num_train}{f'+{self.num_serve}' if self.num_serve else ''}x{self.gpu.name}"

    @property
    def link(self) -> float:
        """Bytes/s at which a GPU gathers what all that train hold: between machines all ports of one take part."""
        between = math.inf if self.num_train <= GPUS_PER_MACHINE else GPUS_PER_MACHINE * NETWORK
        return min(self.gpu.link, between)


def parse_gpus(text: str) -> Cluster:
    """Reads `--gpus`: `8xH100-80GB`, or `64+8xH100-80GB` where 64 train and 8 serve vLLM. Raises `ValueError`."""
    match = re.fullmatch(r"(?:(\d+)(?:\+(\d+))?x)?([A-Za-z].*|[\d.]+(?i:GB):.*)", text.strip())
    if match is None or match[1] == "0":
        raise ValueError(
            f"`--gpus {text}` cannot be read. Write 8xH100-80GB, or 64+8xH100-80GB: 64 train, 8 serve. {OWN}"
        )
    num_train, num_serve, name = match.groups()
    if ":" in name:
        return Cluster(_read_own(name), int(num_train or 1), int(num_serve or 0))
    known = {known.lower(): gpu for known, gpu in GPUS.items()} | {"cpu": cpu()}
    models = [key.split("-")[0] for key in known]
    short = {model: key for model, key in zip(models, known, strict=True) if models.count(model) == 1}
    name = short.get(name.lower(), name.lower())
    if name not in known:
        raise ValueError(f"`--gpus {text}` names no GPU that is known: {', '.join([*GPUS, 'CPU'])}. {OWN}")
    return Cluster(known[name], int(num_train or 1), int(num_serve or 0))


def _read_own(name: str) -> GPU:
    """A GPU that is not on the list, by its data sheet; its neighbours are reached over PCIe."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(rf"{number}GB:[^:\s,]+:{number}TB/s:{number}TFLOPs", name, re.IGNORECASE)
    sizes = [float(size) for size in found.groups()] if found else [0.0]
    if not all(sizes):
        raise ValueError(f"`--gpus` cannot read the GPU {name}. {OWN}")
    gigabytes, bandwidth, teraflops = sizes
    return GPU(name, gigabytes * 1e9, teraflops * 1e12, bandwidth * 1e12, PCIE)


def read_hardware(text: str) -> Cluster | None:
    """Reads a recipe's `Hardware:`, such as `one GPU of 24 GB`; `None` where it names no GPUs of a known size."""
    if "CPU" in text and "GPU" not in text:
        return Cluster(cpu(), 1)
    number = r"\b(one|two|\d+)"
    found = re.search(rf"{number} GPUs? of (\d+) GB", text)
    if found is None or int(found[2]) not in GPU_OF_SIZE:
        return None
    counts = [re.search(rf"{number}\b[^,.;:]*\b{verb}\b", text) for verb in ("trains?", "serves?")]
    num_train, num_serve = (
        0 if count is None else {"one": 1, "two": 2}.get(count[1]) or int(count[1])
        for count in (counts[0] or found, counts[1])
    )
    return Cluster(GPUS[GPU_OF_SIZE[int(found[2])]], num_train, num_serve) if num_train else None
