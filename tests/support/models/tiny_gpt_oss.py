"""A gpt-oss of two small layers with the whole Harmony vocabulary, trained within seconds to hold a few conversations.

`tiny_gpt_oss_folder()` is a Hugging Face folder (config, bfloat16 weights, tokenizer), made once and kept under the
user's cache. What it knows is in tiny_lessons.py; ask it at temperature 0.
"""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Final

from tests.live.vllm_server import cache_dir, run, sole_builder

MODEL: Final = "tiny-gpt-oss"
TRAIN_S: Final = 300.0
PROGRAM: Final = "tests.support.models.tiny_gpt_oss_training"
"""A program of its own: transformers takes seconds to import, and nearly all test processes find the model made."""
MADE_OF: Final = ("tiny_gpt_oss_training.py", "tiny_lessons.py", "tiny_tokenizer.py")


def tiny_gpt_oss_folder() -> Path:
    """The model's folder, made if it is not there yet. Raises RuntimeError."""
    made_of = [Path(__file__).with_name(name) for name in MADE_OF]
    recipe = hashlib.sha256(b"".join(file.read_bytes() for file in made_of)).hexdigest()[:16]
    folder = cache_dir() / f"{MODEL}-{recipe}"
    with sole_builder(cache_dir() / f"{MODEL}.lock"):
        if not folder.is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            run("training the tiny gpt-oss", sys.executable, "-m", PROGRAM, partial, timeout_s=TRAIN_S)
            partial.rename(folder)
    return folder
